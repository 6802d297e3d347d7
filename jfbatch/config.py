"""The settings of a run: defaults < YAML file < environment < flags, checked before anything starts.

RunConfig is the one list of settings. The command line's flags and docs/configuration.md are made from
its fields, so that a name, a default and a description exist once.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from jfbatch.errors import UsageError
from jfbatch.settings_file import read_settings

ENVIRONMENT_PREFIX = "JFBATCH_"
# Variables with the prefix that are no settings of a run.
_OTHER_VARIABLES = frozenset({"JFBATCH_CONFIG", "JFBATCH_TEST_DATA"})
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def _setting(default: Any, panel: str, description: str, short: str | None = None, **limits: Any) -> Any:
    """A field of RunConfig: its default, the help panel it is listed in, one sentence on it."""
    return pydantic.Field(
        default, description=description, json_schema_extra={"panel": panel, "short": short}, **limits
    )


def _split_list(value: Any) -> Any:
    """A flag or variable gives a list as text with commas; YAML gives a list."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list):
        # YAML reads 7 and true as other types; they stand for their own spelling.
        return tuple(json.dumps(part) if isinstance(part, int) else part for part in value)
    return value


def _parse_bytes(value: Any) -> Any:
    """'2GiB', '500MB' or a number of bytes."""
    if isinstance(value, str) and (match := _BYTES.fullmatch(value.strip())):
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    return value


TextList = Annotated[tuple[str, ...], pydantic.BeforeValidator(_split_list)]
ByteCount = Annotated[int, pydantic.BeforeValidator(_parse_bytes)]


class RunConfig(pydantic.BaseModel):
    """All settings of one run. Immutable; unknown settings are refused."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, protected_namespaces=()
    )

    # Input and output
    inputs: TextList = _setting((), "Input and output", "The files with the prompts; - is standard input.")
    output: Path | None = _setting(None, "Input and output", "The table to write, Parquet or JSONL.", "-o")
    output_format: Literal["auto", "parquet", "jsonl", "openai"] = _setting(
        "auto", "Input and output", "auto goes by the output's suffix; openai writes batch results."
    )
    prompt_column: str | None = _setting(
        None, "Input and output", "The field or column with the prompt, if it is not called prompt."
    )
    schema_column: str | None = _setting(
        None, "Input and output", "The field or column with the row's schema, if it is not called schema."
    )
    id_column: str | None = _setting(
        None, "Input and output", "The field or column with the row's id, if it is not called id."
    )
    keep: TextList = _setting((), "Input and output", "Further input fields to carry to the output.")
    flatten: bool = _setting(
        False, "Input and output", "Make each top-level property of the value a column of its own."
    )
    arrow_dates: bool = _setting(
        False, "Input and output", "Give date, time and date-time strings their own Arrow types."
    )
    overwrite: bool = _setting(
        False,
        "Input and output",
        "Start anew where the output was made with different settings or by something else; with the same "
        "settings finished rows are kept.",
    )
    retry: Literal["none", "failed", "invalid", "all"] = _setting(
        "none",
        "Input and output",
        "Which finished rows to run again: failed ones, refused and invalid ones, or all without a value.",
    )
    duplicate_ids: Literal["refuse", "keep"] = _setting(
        "refuse",
        "Input and output",
        "What happens to a row whose id came before: invalid_input, or run as well.",
    )
    keep_parts: bool = _setting(False, "Input and output", "Leave the parts beside the finished table.")
    flush_rows: int = _setting(256, "Input and output", "Commit a part after this many finished rows.", ge=1)
    flush_seconds: float = _setting(15.0, "Input and output", "Commit a part after this many seconds.", gt=0)
    summary_json: Path | None = _setting(
        None, "Input and output", "Also write counts, timings and settings to this JSON file."
    )

    profile: Path | None = _setting(
        None,
        "Input and output",
        "Write where the time went as a Chrome trace (JSON) to this file, and print it as a table. "
        "Of one process: not with --devices.",
    )

    # What outputs must obey
    schema_file: Path | None = _setting(
        None, "Pattern", "JSON Schema for the rows that bring no pattern of their own.", alias="schema"
    )
    regex: str | None = _setting(None, "Pattern", "Regular expression that the whole output must match.")
    choice: TextList = _setting((), "Pattern", "The outputs to choose from, with commas between them.")
    grammar_file: Path | None = _setting(
        None, "Pattern", "Grammar file the output must follow.", alias="grammar"
    )
    backend: Literal["auto", "fsm", "llguidance", "xgrammar", "outlines"] = _setting(
        "auto",
        "Pattern",
        "Grammar engine of the rows that name none; auto is fsm, our own, and llguidance, where installed, "
        "for what fsm refuses.",
    )
    json_style: Literal["spaced", "compact", "pretty"] = _setting(
        "spaced", "Pattern", "How JSON is laid out: as json.dumps prints, without spaces, or indented by two."
    )
    objects: Literal["closed", "open"] = _setting(
        "closed", "Pattern", "Whether objects may have undeclared properties where their schema lets them."
    )
    strict: bool = _setting(
        False,
        "Pattern",
        "Refuse a schema that cannot be enforced in full, instead of checking outputs after.",
    )
    max_string: int | None = _setting(
        None, "Pattern", "Most characters of a string without maxLength, pattern or format.", ge=1
    )
    integers: Literal["int64", "any"] = _setting(
        "int64",
        "Pattern",
        "int64 holds integers that lack a bound to int64, in arguments of tools too; any lets them be of any "
        "size, text in the table.",
    )
    retries: int = _setting(
        2, "Pattern", "How often to sample again an output that fails the check afterwards.", ge=0
    )
    compile_timeout: float = _setting(10.0, "Pattern", "Seconds that compiling one pattern may take.", gt=0)
    compile_threads: int = _setting(1, "Pattern", "Background threads that compile patterns.", ge=1)
    cache_dir: Path | None = _setting(
        None,
        "Pattern",
        "Directory of the grammar cache and the demo model's copy, by default jfbatch in $SLURM_TMPDIR, "
        "in a Slurm job $TMPDIR, $XDG_CACHE_HOME or ~/.cache.",
    )

    # Model and prompt
    model: str = _setting(
        "demo", "Model and prompt", "demo, a model directory, a hub name or a .gguf file.", "-m", min_length=1
    )
    trust_remote_code: bool = _setting(
        False, "Model and prompt", "Let the model's repository run Python code of its own."
    )
    system: str | None = _setting(None, "Model and prompt", "System message put before every prompt.")
    raw: bool = _setting(False, "Model and prompt", "Take prompts as they are, without the chat template.")
    tool_format: str = _setting(
        "auto",
        "Model and prompt",
        "How the model writes calls of tools: auto (as its chat template shows), hermes, function, llama, or "
        "the text of a call with NAME and ARGS in it.",
        min_length=1,
    )
    reasoning_end: str = _setting(
        "auto",
        "Model and prompt",
        "The tag that ends the model's thinking, after which its output begins; auto is the one its chat "
        "template shows, none turns it off.",
        min_length=1,
    )

    # Sampling
    max_tokens: int = _setting(512, "Sampling", "Most tokens of one output.", ge=1)
    max_reasoning_tokens: int = _setting(
        1024, "Sampling", "Most tokens of thinking before an output, besides --max-tokens.", ge=0
    )
    temperature: float = _setting(
        0.0, "Sampling", "0 takes the likeliest token; above it, sample.", ge=0, le=1000
    )
    seed: int = _setting(0, "Sampling", "Seed of sampling; an output depends on it and its row alone.")
    repetition_stop: bool = _setting(
        True, "Sampling", "End an output that repeats the same 20 tokens 8 times over (on or off)."
    )

    # Speed
    device: str = _setting("auto", "Speed", "cpu, cuda, cuda:N, or auto: cuda where present.")
    dtype: Literal["auto", "f32", "bf16", "f16"] = _setting(
        "auto", "Speed", "Weights' type; auto is f32 on CPU and bf16 on CUDA."
    )
    threads: int | None = _setting(None, "Speed", "CPU threads, by default one per physical core.", ge=1)
    batch_size: int = _setting(64, "Speed", "Most rows decoded at once.", ge=1)
    kv_memory: ByteCount | None = _setting(
        None,
        "Speed",
        "Memory for the KV cache, such as 2GiB; by default half of the free RAM, or most of a GPU's.",
        ge=1,
    )
    kv_dtype: Literal["auto", "f32", "bf16"] = _setting(
        "auto", "Speed", "Type of the KV cache; auto is bf16 for f32 weights, else the weights' own type."
    )
    jump: bool = _setting(True, "Speed", "Skip sampling what the grammar determines (on or off).")
    drafts: bool = _setting(True, "Speed", "Verify likely tokens several at a time (on or off).")
    window: int = _setting(50_000, "Speed", "Rows read ahead, grouped and sorted together.", ge=1)

    # Several processes
    shard: str | None = _setting(
        None,
        "Several processes",
        "Run only the rows of one shard, such as 3/8 (from 1/8 to 8/8); auto is this Slurm array element's.",
    )
    shard_by: Literal["row", "pattern"] = _setting(
        "row",
        "Several processes",
        "row spreads rows evenly; pattern keeps rows of one pattern and one beginning together.",
    )

    devices: str | None = _setting(
        None,
        "Several processes",
        "One process per device, over shards: 0,1,2,3 or all for GPUs, cpu:N for N on this CPU.",
    )
    tensor_parallel: int = _setting(
        1,
        "Several processes",
        "Cut a model that one device cannot hold over N of them, by transformers' plan.",
        ge=1,
    )
    requeue: bool = _setting(
        False,
        "Several processes",
        "Inside a Slurm job: after SIGTERM, with what is finished committed, have Slurm run the job again.",
    )

    # While it runs
    max_failures: int | None = _setting(None, "While it runs", "Stop after this many failed rows.", ge=1)
    grace: float = _setting(25.0, "While it runs", "Seconds to commit finished rows after SIGTERM.", ge=0)
    quiet: bool = _setting(False, "While it runs", "No progress and no summary.", "-q")

    @pydantic.field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("must be auto, cpu, cuda or cuda:N")
        return value

    @pydantic.field_validator("devices")
    @classmethod
    def _known_devices(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"all|cpu:[1-9]\d{0,3}|\d{1,4}(,\d{1,4})*", value):
            raise ValueError("must be all, GPU numbers such as 0,1,2,3, or cpu:N")
        return value

    @pydantic.field_validator("shard")
    @classmethod
    def _known_shard(cls, value: str | None) -> str | None:
        if value is None or value == "auto":
            return value
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError("must be auto or i/n with i from 1 to n: the first of 8 is 1/8, the last 8/8")
        return value

    @pydantic.field_validator("dtype", "kv_dtype", mode="before")
    @classmethod
    def _dtype_by_its_long_name(cls, value: Any) -> Any:
        return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(value, value)

    @pydantic.field_validator("choice")
    @classmethod
    def _distinct_choices(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("names no text to choose from")
        if len(set(value)) != len(value):
            raise ValueError("lists a text twice")
        return value

    @pydantic.model_validator(mode="after")
    def _one_pattern(self) -> RunConfig:
        given = [
            setting.name
            for setting in settings()
            if setting.field in _PATTERNS and getattr(self, setting.field)
        ]
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(given)}, not both")
        return self

    @property
    def cache_directory(self) -> Path:
        """Where the grammar cache and the demo model's copy lie."""
        return self.cache_dir or default_cache_directory()


_PATTERNS = ("schema_file", "regex", "choice", "grammar_file")


@dataclass(frozen=True)
class Setting:
    """One field of RunConfig as people see it; `name` is its key in YAML."""

    field: str
    name: str
    panel: str
    description: str
    default: Any
    annotation: Any
    short: str | None

    @property
    def flag(self) -> str:
        return "INPUT..." if self.field == "inputs" else "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone; what is on by default reads better as `--jump off`."""
        return self.annotation is bool and not self.default

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


def settings() -> Iterator[Setting]:
    """All settings, in the order of RunConfig's fields."""
    for field, info in RunConfig.model_fields.items():
        extra: Any = info.json_schema_extra
        yield Setting(
            field=field,
            name=info.alias or field,
            panel=extra["panel"],
            description=info.description or "",
            default=info.default,
            annotation=info.annotation,
            short=extra["short"],
        )


def load_config(
    flags: Mapping[str, Any], file: Path | None = None, environment: Mapping[str, str] | None = None
) -> RunConfig:
    """The settings of a run from a YAML file, the environment and flags, later ones winning.

    `flags` holds only the flags that were given, by setting name. Raises UsageError naming the setting,
    where it came from and what is wrong.
    """
    by_name = {setting.name: setting for setting in settings()}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    environment = os.environ if environment is None else environment
    layers: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        layers.append((str(file), read_settings(file)))
    layers.append(("the environment", from_environment(environment)))
    layers.append(("the command line", dict(flags)))
    for origin, layer in layers:
        for name in layer:
            if name not in by_name:
                raise UsageError(f"{origin}: unknown setting {name!r}{_nearest(name, by_name)}")
        if any(by_name[name].field in _PATTERNS for name in layer):
            for name in [name for name in values if by_name[name].field in _PATTERNS]:
                del values[name]  # a pattern replaces the pattern of a weaker layer, of whatever kind
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        raise UsageError(_first_complaint(error, origins)) from None


def default_cache_directory(environment: Mapping[str, str] | None = None) -> Path:
    """$JFBATCH_CACHE_DIR, else a node's own disk under Slurm, else the user's cache directory."""
    environment = os.environ if environment is None else environment
    if chosen := environment.get("JFBATCH_CACHE_DIR"):
        return Path(chosen)
    node_local = ("SLURM_TMPDIR", "TMPDIR") if "SLURM_JOB_ID" in environment else ("SLURM_TMPDIR",)
    for variable in (*node_local, "XDG_CACHE_HOME"):
        if base := environment.get(variable):
            return Path(base) / "jfbatch"
    return Path.home() / ".cache" / "jfbatch"


def shown_default(setting: Setting) -> str:
    """The default as a person would write it; empty where there is none."""
    if setting.default is None or setting.default == ():
        return ""
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings in JFBATCH_* variables, as they are written there."""
    return {
        variable.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for variable, value in sorted(environment.items())
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in _OTHER_VARIABLES and value != ""
    }


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name.replace("-", "_").lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def _first_complaint(error: pydantic.ValidationError, origins: Mapping[str, str]) -> str:
    """One line on the first thing wrong: where, which setting, why, what was given."""
    complaint = error.errors(include_url=False, include_context=False)[0]
    reason = complaint["msg"].removeprefix("Value error, ")
    if not complaint["loc"]:
        return reason
    given = str(complaint["loc"][0])
    setting = next(s for s in settings() if given in (s.name, s.field))
    shown = repr(complaint["input"])
    if len(shown) > 60:
        shown = shown[:57] + "..."
    origin = origins.get(setting.name)
    place = {"the environment": setting.variable, "the command line": setting.flag}.get(
        origin or "the command line", f"{origin}: {setting.name}"
    )
    return f"{place}: {reason[:1].lower()}{reason[1:]}, not {shown}"


def _print_page() -> None:
    from jfbatch.configuration_page import configuration_page  # it is made from this module

    print(configuration_page(), end="")


if __name__ == "__main__":
    _print_page()
