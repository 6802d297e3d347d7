"""A grammar as bytes and back, for the disk cache: program, states met so far, masks made so far.

Plain arrays behind a JSON header, compressed. What comes back is checked before use: every index
within its array, so that a planted entry can at worst describe another language, never reach memory.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from jfbatch.grammar import opcodes
from jfbatch.grammar.automaton import Automaton
from jfbatch.grammar.continuations import fill_distances
from jfbatch.grammar.grammar import Grammar
from jfbatch.grammar.listing import Code
from jfbatch.grammar.program import Program
from jfbatch.grammar.vocabulary import Vocabulary

FORMAT = 2
MAX_MASKS = 1024
MAX_BYTES = 1 << 30  # of an entry once decompressed

_CODE_TYPES = {
    "set_has": np.uint8,
    "class_of_byte": np.uint8,
    "class_byte": np.uint8,
    "free": np.uint8,
    "distance": np.int64,
    "counted": np.int64,
    "live": np.uint8,
    "reach": np.uint8,
}
_STATE_TYPES = {
    "rows": np.int32,
    "thread_first": np.int32,
    "thread_count": np.int32,
    "accepting": np.uint8,
    "free_count": np.int32,
    "state_hash": np.uint64,
    "threads": np.int64,
    "parent": np.int32,
    "value": np.int32,
}


def dump_grammar(grammar: Grammar) -> bytes:
    """All that a later run would otherwise make again."""
    automaton = grammar.automaton
    with automaton.lock:
        store = automaton.store
        states, threads, stacks = (
            int(store.meta[i]) for i in (opcodes.STATES, opcodes.THREADS, opcodes.STACKS)
        )
        arrays: dict[str, NDArray[Any]] = {name: getattr(grammar.program.code, name) for name in Code._fields}
        for name in _STATE_TYPES:
            length = threads if name == "threads" else stacks if name in ("parent", "value") else states
            arrays[name] = getattr(store, name)[:length]
        masks = dict(list(grammar.masks.masks.items())[:MAX_MASKS])
        arrays["mask_states"] = np.array(list(masks), np.int64)
        arrays["masks"] = np.array(list(masks.values()), np.uint32).reshape(len(masks), -1)
        header = {
            "format": FORMAT,
            "start": grammar.program.start,
            "start_state": automaton.start,
            "unenforced": grammar.unenforced,
            "warnings": grammar.warnings,
            "shapes": {name: array.shape for name, array in arrays.items()},
        }
        body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    head = json.dumps(header).encode()
    return zstandard.compress(len(head).to_bytes(4, "little") + head + body, 3)


def load_grammar(data: bytes, vocabulary: Vocabulary) -> Grammar:
    """The grammar in `data`. Raises ValueError if it is not one this version wrote for this vocabulary."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_BYTES)
    except zstandard.ZstdError as error:
        raise ValueError(f"not a stored grammar: {error}") from None
    length = int.from_bytes(raw[:4], "little")
    header = json.loads(raw[4 : 4 + length])
    if header["format"] != FORMAT:
        raise ValueError(f"stored in format {header['format']}, not {FORMAT}")
    arrays = _read_arrays(header["shapes"], memoryview(raw)[4 + length :])
    code = Code(**{name: arrays[name] for name in Code._fields})
    _check_code(code, header["start"])
    fill_distances(code)
    automaton = _restore_states(Program(code, header["start"]), arrays, header["start_state"])
    grammar = Grammar(automaton.program, vocabulary, header["unenforced"], header["warnings"], automaton)
    _restore_masks(grammar, arrays["mask_states"], arrays["masks"])
    return grammar


def _read_arrays(shapes: dict[str, list[int]], body: memoryview) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    position = 0
    for name in (*Code._fields, *_STATE_TYPES, "mask_states", "masks"):
        shape = tuple(int(size) for size in shapes[name])
        default: Any = {"mask_states": np.int64, "masks": np.uint32}.get(name, np.int32)
        kind = np.dtype(_CODE_TYPES.get(name) or _STATE_TYPES.get(name) or default)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if min(shape, default=0) < 0 or position + size > len(body):
            raise ValueError(f"{name}: an array is cut short")
        arrays[name] = np.frombuffer(body[position : position + size], kind).reshape(shape).copy()
        position += size
    return arrays


def _check(condition: Any, what: str) -> None:
    if not bool(condition):
        raise ValueError(f"a stored grammar's {what} is out of bounds")


def _within(values: NDArray[Any], low: int, high: int, what: str) -> None:
    if values.size:
        _check(values.min() >= low and values.max() < high, what)


def _check_code(code: Code, start: int) -> None:
    """Every operand within what it indexes."""
    n, classes = len(code.op), len(code.class_byte)
    _check(n > 0 and 0 <= start < n and 0 < classes <= 256, "size")
    for name in ("op", "x", "y", "z", "loop_of", "distance", "low", "high", "free"):
        _check(getattr(code, name).shape == (n,), name)
    _check(code.class_of_byte.shape == (256,) and code.class_size.shape == (classes,), "classes")
    _check(code.set_has.ndim == 2 and code.set_has.shape[1] == classes, "sets")
    _check(code.leaf_rows.ndim == 2 and code.leaf_rows.shape[1] == classes, "leaf rows")
    _check(code.targets.ndim == 1, "targets")
    _within(code.op, 0, opcodes.COUNTED + 1, "opcode")
    _within(code.class_of_byte, 0, classes, "class of a byte")
    _within(code.targets, 0, n, "target")
    _within(code.loop_of, -1, n, "loop")
    _within(code.high, -1, 1 << 31, "bound")
    counting = np.isin(code.op[code.loop_of[code.loop_of >= 0]], (opcodes.LOOP, opcodes.COUNTED))
    _check(counting.all(), "loop")
    limits = {  # opcode -> (limit of x, limit of y); None = unused or checked below
        opcodes.BYTE: (len(code.set_has), n),
        opcodes.SPLIT: (None, None),
        opcodes.JUMP: (n, None),
        opcodes.PUSH: (n, None),
        opcodes.LOOP: (n, n),
        opcodes.INCREMENT: (n, None),
        opcodes.CALL: (n, n),
        opcodes.LEAF: (len(code.leaf_rows), n),
        opcodes.ENTER: (n, None),
        opcodes.COUNTED: (len(code.leaf_rows), n),
    }
    for op, (x_limit, y_limit) in limits.items():
        chosen = code.op == op
        if x_limit is not None:
            _within(code.x[chosen], 0, x_limit, "operand")
        if y_limit is not None:
            _within(code.y[chosen], 0, y_limit, "operand")
    split = code.op == opcodes.SPLIT
    _within(code.x[split], 0, len(code.targets), "split")
    _within(code.y[split], 1, len(code.targets) + 1, "split")
    ends = code.x[split].astype(np.int64) + code.y[split]
    _within(ends, 0, len(code.targets) + 1, "split")
    for op in (opcodes.PUSH, opcodes.INCREMENT):
        _check((code.op[code.x[code.op == op]] == opcodes.LOOP).all(), "loop")
    used = np.unique(code.x[code.op == opcodes.LEAF])
    targets = code.leaf_rows[used]
    _within(targets, -1, n, "leaf target")
    _check((code.op[targets[targets >= 0]] == opcodes.LEAF).all(), "leaf target")
    _check((code.op[code.x[code.op == opcodes.ENTER]] == opcodes.COUNTED).all(), "counted leaf")
    _check_counted(code)


def _check_counted(code: Code) -> None:
    """States of counted leaves lead to states of the same leaf, and its bitmaps cover them."""
    _check(code.counted.ndim == 2 and code.counted.shape[1] == 5, "counted leaves")
    _check(code.live.ndim == 1 and code.reach.shape == code.live.shape, "bitmaps")
    at = np.flatnonzero(code.op == opcodes.COUNTED)
    if not len(at):
        return
    _within(code.high[at], 0, len(code.counted), "counted leaf")
    offset, size, low, high, _ = code.counted.T
    _check((offset >= 0).all() and (size > 0).all() and (low >= 0).all() and (high >= low).all(), "counts")
    _check((high < 1 << 31).all() and (offset + size * (high + 1) <= len(code.live)).all(), "bitmaps")
    _check((code.low[at] >= 0).all() and (code.low[at] < size[code.high[at]]).all(), "counted state")
    _check((code.loop_of[at] == at).all(), "counted state")
    _within(code.z[at], 0, 4, "counted state")
    targets = code.leaf_rows[code.x[at]]
    _within(targets, -1, len(code.op), "counted target")
    same = code.high[targets] == code.high[at][:, None]
    _check(((targets < 0) | ((code.op[targets] == opcodes.COUNTED) & same)).all(), "counted target")


def _restore_states(program: Program, arrays: dict[str, NDArray[Any]], start_state: int) -> Automaton:
    states, threads, stacks = len(arrays["rows"]), len(arrays["threads"]), len(arrays["parent"])
    n, classes = len(program.code.op), len(program.code.class_byte)
    _check(states > 0 and stacks > 0 and 0 <= start_state < states, "state")
    _check(arrays["rows"].shape == (states, classes), "rows")
    for name in ("thread_first", "thread_count", "accepting", "free_count", "state_hash"):
        _check(arrays[name].shape == (states,), name)
    _check(arrays["value"].shape == (stacks,) and arrays["threads"].ndim == 1, "stacks")
    _within(arrays["rows"], opcodes.UNKNOWN, states, "transition")
    _within(arrays["thread_first"], 0, threads + 1, "thread")
    _within(arrays["thread_count"], 1, threads + 1, "thread")
    ends = arrays["thread_first"].astype(np.int64) + arrays["thread_count"]
    _within(ends, 0, threads + 1, "thread")
    _within(arrays["threads"] >> 32, 0, n, "instruction")
    _within(arrays["threads"] & 0xFFFFFFFF, 0, stacks, "stack")
    _check((arrays["parent"] <= np.maximum(np.arange(stacks) - 1, 0)).all(), "stack")
    _within(arrays["parent"], 0, stacks, "stack")
    _within(arrays["value"], 0, 1 << 31, "stack")
    return Automaton.restored(program, arrays, start_state)


def _restore_masks(grammar: Grammar, states: NDArray[np.int64], masks: NDArray[np.uint32]) -> None:
    if not len(states):
        return
    vocabulary = grammar.vocabulary
    _check(masks.shape == (len(states), vocabulary.words), "masks")
    _within(states, 0, grammar.automaton.state_count, "mask's state")
    never = np.full(vocabulary.words * 32, 1, np.uint8)  # ids that no mask may ever allow
    allowed = [token for token, data in enumerate(vocabulary.token_bytes) if data]
    never[allowed] = 0
    never[list(vocabulary.end_ids)] = 0
    _check(not (masks & np.packbits(never, bitorder="little").view(np.uint32)).any(), "mask")
    masks.flags.writeable = False
    grammar.masks.masks.update(zip(states.tolist(), masks, strict=True))
