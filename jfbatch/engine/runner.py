"""The packed forward pass: flat tokens of many rows in, logits at the listed positions out.

transformers' own model code runs unchanged; only its attention function is ours (attention.py) and, on a
CPU, linear layers (linear.py), norms, gates (elementwise.py) and layers of the Llama kind (decoder_layer.py,
decoder_stack.py). On CUDA, steps of short segments are replayed
(static_step.py). What cannot run this way is refused by name before the first row.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jfbatch.engine import attention
from jfbatch.engine.attention import Layout, Span, StepLayout
from jfbatch.engine.cpu_attention import can_attend
from jfbatch.engine.decoder_layer import fuse_layers
from jfbatch.engine.decoder_stack import stack_layers
from jfbatch.engine.elementwise import fuse_elementwise
from jfbatch.engine.graphs import CudaRecorder, Recorder, StepCounts
from jfbatch.engine.kv_cache import SlotPool
from jfbatch.engine.linear import pack_linears
from jfbatch.engine.static_step import StaticSteps
from jfbatch.engine.transfer import on_device
from jfbatch.errors import ModelError

KV_DTYPES = {"auto": None, "f32": torch.float32, "bf16": torch.bfloat16}
"""What the KV storage may hold, by the names people give; auto is as Runner says."""

# model_type of the architectures whose greedy tokens the tests compare with generate(). Others are
# compared with their own attention once, at the start.
TESTED_ARCHITECTURES = frozenset(
    {"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "olmo"}
    | {"gpt_neox", "gpt_oss"}
)

_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# What third-party model code raises when it is run in a way it was not written for.
_MODEL_FAULTS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
)


@dataclass(frozen=True)
class Segment:
    """One row's part of a step.

    `token_ids` sit at positions `start`.. of the row in `slot`; `logits` are the indices among them at
    which logits are wanted, ascending. `prompt`: how many tokens of the row are its prompt.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    logits: Sequence[int] = ()
    prompt: int = 0


@dataclass(frozen=True)
class LateTokens:
    """Tokens of a step that the host does not know yet.

    places: their indices in the step's flat token list, which holds any id there. ids: int64 [places], on
    the device.
    """

    places: Sequence[int]
    ids: Tensor


class Runner:
    """Runs packed steps of one decoder-only model on one device.

    Parameters
    ----------
    model: a transformers causal language model, in the dtype and on the device it will run on. Its
        attention implementation and, on a CPU, its linear layers are replaced in place.
    kv_dtype: dtype of the KV storage. Default: bfloat16 for float32 weights, else the weights' own.
    pack: pack linear layers on a CPU.
    static: compute steps of short segments in fixed shapes, as CUDA graphs where there are any. Default:
        on CUDA. On a CPU it serves tests: attention is then as on CUDA, not the CPU's own.

    Raises ModelError naming the architecture if it cannot be run packed.
    """

    pool_type = SlotPool
    takes_late_tokens = True

    def __init__(
        self,
        model: Any,
        kv_dtype: torch.dtype | None = None,
        pack: bool = True,
        static: bool | None = None,
    ) -> None:
        self.model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config()
        self.architecture: str = config.model_type
        self.vocabulary_size: int = config.vocab_size
        self.layer_count: int = config.num_hidden_layers
        if kv_dtype is None:
            kv_dtype = torch.bfloat16 if self.dtype == torch.float32 else self.dtype
        on_cuda = self.device.type == "cuda"
        self.steady = on_cuda if static is None else static
        for_kernel = can_attend(self.device, kv_dtype) and not self.steady
        self.pool = self.pool_type(self.device, kv_dtype, for_kernel)
        parameters = inspect.signature(model.forward).parameters
        self._selects_logits = "logits_to_keep" in parameters
        self._refuse_by_configuration(config)
        reference = None
        if self.architecture not in TESTED_ARCHITECTURES:
            reference = self._reference_logits()
        self.logits_share = _logits_share(model)
        self._switch_attention()
        self._stacked = False  # whether all layers are one module
        if pack:
            if self.pool.for_kernel:
                fuse_elementwise(model)
                if fuse_layers(model, kv_dtype) == self.layer_count:
                    self._stacked = stack_layers(model, kv_dtype)
            pack_linears(model)
        self._static: StaticSteps | None = None
        # Whether the last step took as long as such steps will: not where it was, or may be, recorded.
        self.typical = True
        self.counts = StepCounts()
        self._prove(reference)
        self.counts = StepCounts()
        if self.steady:
            recorder = CudaRecorder(self.device) if on_cuda else None
            self.replay_by(recorder)

    def replay_by(self, recorder: Recorder | None) -> None:
        """Compute short steps in fixed shapes from now on, recorded by `recorder` where there is one."""
        self._static = StaticSteps(self._computed, self.pool, self.counts, recorder)

    def forward(self, segments: Sequence[Segment], late: LateTokens | None = None) -> Tensor:
        """Run one step; returns float32 logits [number of `logits`, vocabulary] in segment order.

        On CUDA it returns before they are computed. The pool must have room (`pool.resize`) for every
        segment. Raises torch.OutOfMemoryError.
        """
        with torch.inference_mode():
            if self._static is not None and (size := self._static.size(segments)) is not None:
                logits = self._static.run(segments, size, late)
                self.typical = self._static.typical
                return logits
            self.counts.eager += 1
            self.typical = self._static is None or not self._static.graphs.active
            return self._eager(segments, late)

    def attended(self, segments: Sequence[Segment]) -> tuple[int, int]:
        """Over how many slots, and how many positions of each, a step attends at most."""
        if self._static is not None and (size := self._static.size(segments)) is not None:
            return size.slots + size.extra, size.length
        return 1 + max(segment.slot for segment in segments), self.pool.length

    def _eager(self, segments: Sequence[Segment], late: LateTokens | None) -> Tensor:
        """A step in tensors of its own shapes."""
        spans: list[Span] = []
        flat: list[int] = []
        wanted: list[int] = []
        for segment in segments:
            first, count = len(flat), len(segment.token_ids)
            spans.append(Span(segment.slot, segment.start, first, count, segment.prompt))
            flat.extend(segment.token_ids)
            wanted.extend(first + index for index in segment.logits)
        tokens = on_device(flat, torch.int64, self.device)
        if late is not None:
            tokens.index_copy_(0, on_device(late.places, torch.int64, self.device), late.ids)
        keep = on_device(wanted, torch.int64, self.device)
        some = keep if len(wanted) < len(flat) else None
        layout = StepLayout(self.pool, spans, some, awake=self._stacked)
        return self._computed(tokens.unsqueeze(0), layout.positions.unsqueeze(0), keep, layout).float()

    def give_back(self) -> None:
        """Free the memory that steps before have left on the device."""
        if self._static is not None:
            self._static.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _computed(self, tokens: Tensor, positions: Tensor, keep: Tensor, layout: Layout) -> Tensor:
        """`_logits` of a step. Raises ModelError where a layer has not asked for its attention."""
        logits = self._logits(tokens, positions, keep, {"step": layout})
        if layout.attention_calls != self.layer_count:
            raise ModelError(
                f"{self.architecture}: {layout.attention_calls} of {self.layer_count} layers use "
                "transformers' AttentionInterface; this architecture cannot be run, choose another model"
            )
        return logits

    def _logits(self, tokens: Tensor, positions: Tensor, keep: Tensor, extra: dict[str, Any]) -> Tensor:
        """[len(keep), vocabulary] at the flat positions `keep` of tokens [1, length]."""
        if self._selects_logits:
            extra = {"logits_to_keep": keep, **extra}
        output = self.model(
            input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True, **extra
        )
        logits: Tensor = output.logits[0]
        return logits if self._selects_logits else logits[keep]

    def _refuse_by_configuration(self, config: Any) -> None:
        """Refuse what is known from the configuration alone to break packed causal attention."""
        unknown = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
        if unknown:
            raise ModelError(
                f"{self.architecture}: layers of type {', '.join(sorted(unknown))} cannot be run"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"{self.architecture} is an encoder-decoder; only decoders can be run")
        if getattr(config, "use_bidirectional_attention", False):
            raise ModelError(f"{self.architecture} attends in both directions; it cannot be run")

    def _switch_attention(self) -> None:
        attention.register()
        supported = getattr(self.model, "_can_set_attn_implementation", lambda: False)
        try:
            if not supported():
                raise ValueError("it does not use AttentionInterface")
            self.model.set_attn_implementation(attention.ATTENTION_NAME)
        except _MODEL_FAULTS as error:
            raise ModelError(
                f"{self.architecture} cannot take another attention ({error}); choose another model"
            ) from error

    def _probe_ids(self) -> tuple[list[int], list[int]]:
        """Two short rows of token ids spread over the vocabulary."""
        step = max(self.vocabulary_size // 17, 1)
        return [(7 + i * step) % self.vocabulary_size for i in range(11)], [
            (3 + i * step * 2) % self.vocabulary_size for i in range(7)
        ]

    def _reference_logits(self) -> Tensor:
        """Last-position logits [2, vocabulary] of the probe rows by the model's own attention."""
        rows = []
        for ids in self._probe_ids():
            tokens = torch.tensor([ids], device=self.device)
            positions = torch.arange(len(ids), device=self.device).unsqueeze(0)
            keep = torch.tensor([len(ids) - 1], device=self.device)
            try:
                with torch.inference_mode():
                    rows.append(self._logits(tokens, positions, keep, {})[0].float())
            except _MODEL_FAULTS as error:
                raise ModelError(f"{self.architecture} cannot be run: {error}") from error
        return torch.stack(rows)

    @torch.inference_mode()
    def _prove(self, reference: Tensor | None) -> None:
        """Run two probe rows packed, in two steps; compare with `reference` where there is one."""
        long, short = self._probe_ids()
        self.pool.resize(2, len(long))
        try:
            self.forward([Segment(0, 0, long[:6]), Segment(1, 0, short[:-1])])
            logits = self.forward([Segment(0, 6, long[6:], [4]), Segment(1, len(short) - 1, short[-1:], [0])])
        except _MODEL_FAULTS as error:
            raise ModelError(f"{self.architecture} cannot be run packed: {error}") from error
        self.pool.resize(0, 1)
        if reference is not None:
            pairs = torch.stack([logits, reference], dim=1)  # [2, 2, vocabulary]
            agreement = min(float(torch.corrcoef(pair)[0, 1]) for pair in pairs)
            if not agreement > 0.98:
                raise ModelError(
                    f"{self.architecture}: packed logits differ from the model's own (correlation "
                    f"{agreement:.3f}); this architecture cannot be run, choose another model"
                )


def _logits_share(model: Any) -> float:
    """The LM head's work for one position over that of all layers, by their weights."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    shared = {id(table.weight): table.weight.numel() for table in tables if table is not None}
    layers = sum(weight.numel() for weight in model.parameters() if id(weight) not in shared)
    return float(max(shared.values(), default=0) / max(layers, 1))
