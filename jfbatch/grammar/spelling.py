"""What each token id of a tokenizer contributes to the output, as bytes.

A tokenizer stores its pieces in a spelling of its own (a printable alphabet for bytes, U+2581 for a
space, <0xNN> for a byte). Its decoder section says which; undoing it piece by piece gives the bytes
that the id adds in the middle of a text, which is what a grammar must read.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jfbatch.errors import ModelError

Section = Mapping[str, Any] | None

# Markers never meant as text, by their looks: <|im_start|>, <｜User｜>.
_CONTROL = re.compile(r"<[|｜][^<>\s]+[|｜]>")
# Places kept free for later fine-tuning: their embeddings were never trained.
_PLACEHOLDER = re.compile(
    r"[<\[](?:unused|reserved|extra_id|special|placeholder)[_-]?\d*[>\]]", re.IGNORECASE
)
_PLAIN_CONTROL = frozenset({"<unk>", "<pad>", "<mask>", "<bos>", "<eos>", "[multimodal]"})
_TAG = re.compile(r"</?[A-Za-z_][\w-]*>|\[/?[A-Z][A-Z_]*\]")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Names that end a turn or a text, used only where nothing says which ids do.
_END_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|return|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)


@dataclass(frozen=True)
class AddedToken:
    """A token matched in the text before any other splitting."""

    id: int
    content: str
    special: bool


@dataclass(frozen=True)
class TokenizerDescription:
    """The parts of a tokenizer that decide what its ids mean.

    `decoder`, `normalizer` and `pre_tokenizer` are the sections of tokenizer.json. `control_names` are
    the contents of the tokenizer's bos, eos, pad, unk and further special tokens.
    """

    pieces: Mapping[str, int]
    added: tuple[AddedToken, ...] = ()
    decoder: Section = None
    normalizer: Section = None
    pre_tokenizer: Section = None
    byte_fallback: bool = False
    affixes: tuple[str, str] = ("", "")
    control_names: frozenset[str] = frozenset()
    control_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    chat_template: str = ""

    @property
    def is_byte_level(self) -> bool:
        """Whether pieces are written in the alphabet of byte-level BPE."""
        return any(
            "ByteLevel" in kinds
            for kinds in (_kinds(self.decoder), _kinds(self.pre_tokenizer), _kinds(self.normalizer))
        )

    @property
    def adds_prefix_space(self) -> bool:
        """Whether tokenizing a text puts one space before it, which the joined bytes then start with."""
        for step in _steps(self.normalizer):
            if step["type"] == "Prepend":
                return True
        for step in _steps(self.pre_tokenizer):
            if step["type"] == "ByteLevel" and step.get("add_prefix_space"):
                return True
            if step["type"] == "Metaspace":
                return bool(
                    step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
                )
        return False


def describe_tokenizer(tokenizer: Any) -> TokenizerDescription:
    """Describe a transformers fast tokenizer or a `tokenizers.Tokenizer`. Raises ModelError for others."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "get_added_tokens_decoder"):
        raise ModelError(
            f"tokenizer class {type(tokenizer).__name__} is not built on the tokenizers library; "
            "use a model folder that has a tokenizer.json"
        )
    model = backend.model
    control_names = {str(name) for name in getattr(tokenizer, "all_special_tokens", ())}
    if unknown := getattr(model, "unk_token", None):
        control_names.add(unknown)
    end_ids: set[int] = set()
    if tokenizer is not backend:
        eos = getattr(tokenizer, "eos_token_id", None)
        end_ids = set(eos) if isinstance(eos, list | tuple) else {eos} if eos is not None else set()
    template = getattr(tokenizer, "chat_template", None)
    return TokenizerDescription(
        pieces=backend.get_vocab(with_added_tokens=False),
        added=tuple(
            AddedToken(token_id, token.content, token.special)
            for token_id, token in backend.get_added_tokens_decoder().items()
        ),
        decoder=_state(backend.decoder),
        normalizer=_state(backend.normalizer),
        pre_tokenizer=_state(backend.pre_tokenizer),
        byte_fallback=bool(getattr(model, "byte_fallback", False)),
        affixes=(
            getattr(model, "continuing_subword_prefix", None) or "",
            getattr(model, "end_of_word_suffix", None) or "",
        ),
        control_names=frozenset(control_names),
        control_ids=frozenset(getattr(tokenizer, "all_special_ids", ())),
        end_ids=frozenset(end_ids),
        chat_template=template if isinstance(template, str) else json.dumps(template or ""),
    )


def describe_file(path: str | Path) -> TokenizerDescription:
    """Describe a tokenizer.json or tokenizer.json.gz.

    tokenizer_config.json and generation_config.json beside it are read where they exist: they say which
    tokens end a text. Raises ModelError if the file cannot be read as a tokenizer.
    """
    path = Path(path)
    document = _read_json(path)
    try:
        model, listed = document["model"], document.get("added_tokens") or ()
        vocabulary = model["vocab"]
        unknown_names: set[str] = {model["unk_token"]} if model.get("unk_token") else set()
        if isinstance(vocabulary, list):  # Unigram: [[piece, score], ...]
            pieces = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
            if model.get("unk_id") is not None:
                unknown_names.add(vocabulary[model["unk_id"]][0])
        else:
            pieces = vocabulary
        added = tuple(AddedToken(int(t["id"]), str(t["content"]), bool(t["special"])) for t in listed)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ModelError(f"{path}: not a tokenizer.json file ({error!r})") from error
    settings = _read_beside(path, "tokenizer_config.json")
    names = {name for key in _NAMED for name in _contents(settings.get(key))}
    generation = _read_beside(path, "generation_config.json").get("eos_token_id")
    end_ids = {
        int(i) for i in (generation if isinstance(generation, list) else [generation]) if i is not None
    }
    by_content = {token.content: token.id for token in added}
    for name in _contents(settings.get("eos_token")):
        token_id = by_content.get(name, pieces.get(name))
        if token_id is not None:
            end_ids.add(int(token_id))
    return TokenizerDescription(
        pieces=pieces,
        added=added,
        decoder=document.get("decoder"),
        normalizer=document.get("normalizer"),
        pre_tokenizer=document.get("pre_tokenizer"),
        byte_fallback=bool(model.get("byte_fallback")),
        affixes=(model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""),
        control_names=frozenset(names | unknown_names),
        end_ids=frozenset(end_ids),
        chat_template=json.dumps(settings.get("chat_template") or "", ensure_ascii=False),
    )


def spell(description: TokenizerDescription, markers: frozenset[str] = frozenset()) -> list[bytes | None]:
    """The bytes of every id, indexed by id; None where an id is never content.

    Never content are: ids without a piece; added tokens marked special; the tokenizer's own bos, eos,
    pad, unk and further special tokens and its end tokens; anything written <|...|>; added placeholders
    such as <unused7>; ordinary entries written like a tag that the chat template uses as a marker (a
    tokenizer converted from GGUF may list control tokens as ordinary entries); pieces of no bytes.
    Other added tokens (runs of spaces, <table>, <think>) are their literal text, and so are those that
    `markers` names, whatever else they are, unless they end a text.
    """
    if any(description.affixes):
        raise ModelError(
            "this tokenizer marks word parts with a prefix or suffix (WordPiece style), "
            "which loses the spaces; use a byte-level, SentencePiece or Unigram tokenizer"
        )
    piece_bytes = _byte_level if description.is_byte_level else _decoder_steps(description)
    ids = [*description.pieces.values(), *(token.id for token in description.added)]
    table: list[bytes | None] = [None] * (max(ids, default=-1) + 1)
    for piece, token_id in description.pieces.items():
        table[token_id] = piece_bytes(piece) or None
    names = description.control_names
    for piece in _suspects(description):
        table[description.pieces[piece]] = None
    for token in description.added:
        is_control = token.special or token.content in names or _looks_like_control(token.content)
        if is_control:
            table[token.id] = None
        elif description.is_byte_level:  # its text may hold characters that the byte alphabet lacks
            table[token.id] = token.content.encode("utf-8", "replace") or None
        else:
            table[token.id] = piece_bytes(token.content) or None
    for token_id in description.control_ids | description.end_ids:
        if 0 <= token_id < len(table):
            table[token_id] = None
    named = [(piece, description.pieces[piece]) for piece in markers if piece in description.pieces]
    named += [(token.content, token.id) for token in description.added if token.content in markers]
    for text, token_id in named:
        if token_id not in description.end_ids:
            table[token_id] = text.encode()
    return table


def usual_end_ids(description: TokenizerDescription) -> frozenset[int]:
    """The ids of special added tokens with a usual end-of-text or end-of-turn name."""
    return frozenset(t.id for t in description.added if t.special and t.content in _END_NAMES)


_NAMED = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "cls_token",
    "sep_token",
    "mask_token",
    "additional_special_tokens",
)


def _looks_like_control(content: str) -> bool:
    return bool(_CONTROL.fullmatch(content) or _PLACEHOLDER.fullmatch(content)) or content in _PLAIN_CONTROL


def _suspects(description: TokenizerDescription) -> Iterable[str]:
    """Ordinary entries that are control tokens all the same."""
    template = description.chat_template
    for piece in description.pieces:
        if piece[:1] not in ("<", "["):
            if piece in description.control_names:
                yield piece
        elif (
            piece in description.control_names
            or _CONTROL.fullmatch(piece)
            or (_TAG.fullmatch(piece) and piece in template)
            or (not description.is_byte_level and piece in ("<s>", "</s>", "<unk>", "<pad>"))
        ):
            yield piece


def _bytes_to_unicode() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in printable:
            alphabet[chr(0x100 + len(alphabet) - len(printable))] = byte
    return alphabet


_ALPHABET = _bytes_to_unicode()
# For str.translate: stand-in -> the Latin-1 character of its byte; other characters below 256 -> beyond
# Latin-1, so that encoding to Latin-1 fails on every character outside the alphabet.
_TO_LATIN1 = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(byte) for c, byte in _ALPHABET.items()}


def _byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:  # as the tokenizers library does: a piece outside the alphabet is literal
        return piece.encode("utf-8", "replace")


def _decoder_steps(description: TokenizerDescription) -> Any:
    """A function piece -> bytes that does what the decoder section does in the middle of a text."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = description.byte_fallback
    steps = list(_steps(description.decoder))
    if not steps:
        raise ModelError("this tokenizer has no decoder section, so the text of its ids is not defined")
    for step in steps:
        kind = step["type"]
        if kind == "Metaspace":
            replacements.append((step.get("replacement", "▁"), " "))
        elif kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind not in ("Fuse", "Strip"):  # Strip acts on the ends of the whole text only
            raise ModelError(
                f"tokenizer decoder {kind} is not supported: its pieces have no bytes of their own"
            )

    def piece_bytes(piece: str) -> bytes:
        if byte_fallback and len(piece) == 6 and (match := _BYTE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode("utf-8", "replace")

    return piece_bytes


def _steps(section: Section) -> Iterable[Mapping[str, Any]]:
    """The section's steps in order, sequences flattened."""
    if section is None:
        return
    if section.get("type") == "Sequence":
        for key in ("decoders", "normalizers", "pretokenizers"):
            for inner in section.get(key, ()):
                yield from _steps(inner)
    else:
        yield section


def _kinds(section: Section) -> set[str]:
    return {step["type"] for step in _steps(section)}


def _state(part: Any) -> Section:
    """The JSON section of a tokenizers component (its pickling state is exactly that JSON)."""
    if part is None:
        return None
    state: Section = json.loads(part.__getstate__())
    return state


def _contents(value: Any) -> list[str]:
    """The token texts in a tokenizer_config.json entry: a name, a token object, or a list of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [str(value["content"])] if "content" in value else []
    if isinstance(value, list):
        return [name for entry in value for name in _contents(entry)]
    return []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = json.loads(data)
    except (OSError, EOFError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as a tokenizer file ({error})") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: not a tokenizer.json file (it holds no object)")
    return document


def _read_beside(path: Path, name: str) -> dict[str, Any]:
    beside = path.with_name(name)
    return _read_json(beside) if beside.is_file() else {}
