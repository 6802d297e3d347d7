"""The command line: each command parses, calls one function and prints.

Importing this module loads neither torch nor transformers, so that help and mistakes answer at once.
The flags of `run` and `check` are made from RunConfig's fields. Data goes to stdout, all else to stderr.
"""

from __future__ import annotations

import errno
import gc
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_args, get_origin

import typer
from typer.exceptions import TyperException

from jfbatch import __version__, config
from jfbatch.errors import InputError, JfbatchError, OutputError, UsageError
from jfbatch.report.lasting import lasting, silence
from jfbatch.signals import early_signals_kept

app = typer.Typer(
    name="jfbatch",
    help="Batch inference with language models: prompts in, a table out, every output as its schema says.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: one line on stderr for whatever the user can mend, no traceback."""
    if sys.stderr is None:  # it was closed
        sys.exit(_run_command(arguments))
    with redirect_stderr(lasting(sys.stderr)):
        sys.exit(_run_command(arguments))


def _run_command(arguments: Sequence[str] | None) -> int:
    """The exit code of a command line."""
    try:
        ours, others = _split(sys.argv[1:] if arguments is None else arguments)
        code = app(args=ours, prog_name="jfbatch", standalone_mode=False, obj=others)
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()  # what is left must not fail where nobody minds it
    except JfbatchError as error:
        return _complain(str(error), error.exit_code)
    except TyperException as error:  # a flag or argument that does not parse
        reason = getattr(error, "format_message", error.__str__)()
        return _complain(f"{reason} Try 'jfbatch --help' or 'jfbatch run --help'.", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", _INTERRUPTED)
    except BrokenPipeError:  # the reader of our stdout has seen enough, as `| head` does
        silence(sys.stdout)
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EFBIG,
            errno.EIO,
        ):
            raise
        silence(sys.stdout)  # no other stream is written to without a word of our own
        return _complain(f"standard output cannot be written: {error.strerror}", OutputError.exit_code)
    return code if isinstance(code, int) else 0


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and those after `--` that `jfbatch slurm` hands on."""
    ours = list(arguments)
    if ours[:1] != ["slurm"] or "--" not in ours:
        return ours, []
    place = ours.index("--")
    return ours[:place], ours[place + 1 :]


def _complain(reason: str, code: int) -> int:
    print("jfbatch: " + " ".join(reason.split("\n")), file=sys.stderr)
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"jfbatch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


def _run(config_file: Path | None, **flags: Any) -> int:
    """Run every prompt of the inputs through the model and write one table.

    The same command continues what an earlier one left unfinished. Exit codes: 0 all rows ok or shortened,
    1 some rows failed, 2 usage, 65 damaged input, 74 the output cannot be written, 130 and 143 signals.
    """
    settings = _settings(config_file, flags)
    if settings.output is None:
        raise UsageError("no output: say where the table goes with -o TABLE.parquet")
    from jfbatch.engine.model import prepare_environment

    prepare_environment()
    with early_signals_kept():
        return _start(settings)


def _start(settings: config.RunConfig) -> int:
    # What is imported and loaded stays: looking for garbage among it takes a sixth of the time to the first
    # row. Decoding turns the collector on again, with all of that set apart.
    gc.disable()
    try:
        from jfbatch.cluster.start import start  # here, because it brings numba and pyarrow

        return start(settings)
    finally:
        gc.unfreeze()
        gc.enable()


# The settings that decide which rows run; those of the output, of sampling and of speed do not.
_CHECKED = frozenset(
    {
        *(
            "inputs",
            "prompt_column",
            "schema_column",
            "id_column",
            "duplicate_ids",
            "schema_file",
            "regex",
            "choice",
            "grammar_file",
            "backend",
            "json_style",
            "objects",
        ),
        *(
            "strict",
            "max_string",
            "integers",
            "compile_timeout",
            "cache_dir",
            "model",
            "trust_remote_code",
            "system",
            "raw",
            "tool_format",
            "reasoning_end",
            "max_tokens",
        ),
    }
)


def _check(config_file: Path | None, json_file: Path | None, **flags: Any) -> int:
    """Say what a run would do with its rows and patterns, without loading the model's weights.

    For each distinct pattern: enforced, checked after decoding, or refused with place and reason; how many
    automaton states were looked at; the share of bytes it determines; warnings. Then the rows that would
    fail, with their reasons. Exit codes: 0 every row would run, 1 some would fail, 2 usage, 65 damaged input.
    """
    settings = _settings(config_file, flags)
    from jfbatch import check

    return check.check_job(settings, json_file)


def _slurm(config_file: Path | None, context: typer.Context, **flags: Any) -> int:
    """Write sbatch scripts for a run as an array of shards, and the merge that waits for it.

    Takes the flags of `run`. What follows -- is passed to sbatch, as in `-- --account=lab --mem=64G`.
    The scripts go to OUT.slurm; --submit also submits them. Requeued or submitted again they continue.
    """
    request = {name: flags.pop(name) for name in ("array", "gpus", "time", "partition")}
    submits = flags.pop("submit")
    settings = _settings(config_file, flags)
    from jfbatch.cluster import slurm_command

    return slurm_command.run(settings, config_file, _given(flags), request, context.obj, submits)


def _ray(config_file: Path | None, **flags: Any) -> int:
    """Run shards of a job in Ray actors and make one table of them.

    Takes the flags of `run`. Every node of the cluster must see input and output under the same names.
    RAY_ADDRESS says which cluster; without it one is started on this machine.
    """
    asked = {name: flags.pop(name) for name in ("actors", "cpus", "gpus")}
    settings = _settings(config_file, flags)
    if importlib.util.find_spec("ray") is None:
        raise UsageError("ray is not installed: pip install 'jfbatch[ray]'")
    from jfbatch.cluster.ray import run_shards

    return run_shards(settings, **asked)


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None and value != []}


def _settings(config_file: Path | None, flags: dict[str, Any]) -> config.RunConfig:
    """The settings from flags that were given, environment and file. Raises UsageError."""
    settings = config.load_config(_given(flags), config_file)
    if not settings.inputs:
        raise UsageError("no input: name a JSONL file with prompts, or - for standard input")
    return settings


def _metavar(annotation: Any) -> str:
    """How a flag's value is written in the help."""
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return "A,B,.."
    kinds = {bool: "on|off", int: "N", float: "X", Path: "PATH", str: "TEXT"}
    candidates = [annotation, *get_args(annotation)]  # such as `int | None`
    return next((kinds[kind] for kind in candidates if kind in kinds), "SIZE")


def _flag(setting: config.Setting) -> inspect.Parameter:
    """The command-line parameter of one setting; None stands for "not given". pydantic checks the value."""
    kind: Any
    default: Any = None
    if setting.field == "inputs":
        kind = Annotated[Optional[list[str]], typer.Argument(metavar="INPUT...", help=setting.description)]  # noqa: UP045
    else:
        names = [setting.flag, *([setting.short] if setting.short else [])]
        is_switch = setting.is_switch
        if is_switch and not setting.short:
            names[0] += f"/--no-{setting.flag[2:]}"
        shown = config.shown_default(setting)
        option = typer.Option(
            *names,
            metavar=None if is_switch else _metavar(setting.annotation),
            help=setting.description + (f" [{shown}]" if shown and not is_switch else ""),
            show_default=False,
        )
        kind = Annotated[Optional[bool] if is_switch else Optional[str], option]  # noqa: UP045
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _register(
    name: str, command: Any, settings: Iterable[config.Setting], *further: inspect.Parameter
) -> None:
    """Make a command whose flags are settings of RunConfig, --config, and `further` ones."""
    file_flag = typer.Option(
        "--config", metavar="FILE", envvar="JFBATCH_CONFIG", help="YAML file with settings."
    )
    parameters = [*map(_flag, settings), _path_flag("config_file", file_flag), *further]
    command.__signature__ = inspect.Signature(parameters, return_annotation=int)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {
        "return": int
    }
    app.command(name)(command)


def _path_flag(name: str, option: Any) -> inspect.Parameter:
    annotation = Annotated[Optional[Path], option]  # noqa: UP045
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_register("run", _run, config.settings())
_register(
    "check",
    _check,
    (setting for setting in config.settings() if setting.field in _CHECKED),
    _path_flag(
        "json_file",
        typer.Option(
            "--json", metavar="FILE", help="Also write what was found as JSON; - prints it instead."
        ),
    ),
)


def _keyword(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


# Which shard a process runs, and that it is requeued, the script says itself.
_OF_THE_SCRIPT = frozenset({"shard", "requeue"})

_register(
    "slurm",
    _slurm,
    (setting for setting in config.settings() if setting.field not in _OF_THE_SCRIPT),
    _keyword("context", typer.Context),
    _keyword(
        "array",
        Annotated[
            str, typer.Option("--array", metavar="N[%M]", help="How many shards (M of them at a time).")
        ],
    ),
    _keyword("gpus", Annotated[int, typer.Option("--gpus", min=0, help="GPUs of each element.")], 1),
    _keyword("time", Annotated[str, typer.Option("--time", metavar="H:MM:SS", help="Time of one start.")]),
    _keyword(
        "partition",
        Annotated[Optional[str], typer.Option("--partition", metavar="NAME", help="Slurm's partition.")],  # noqa: UP045
        None,
    ),
    _keyword("submit", Annotated[bool, typer.Option("--submit", help="Submit them as well.")], False),
)


_register(
    "ray",
    _ray,
    (setting for setting in config.settings() if setting.field not in _OF_THE_SCRIPT),
    _keyword("actors", Annotated[int, typer.Option("--actors", min=1, metavar="N", help="How many actors.")]),
    _keyword("cpus", Annotated[float, typer.Option("--cpus-per-actor", min=0, help="CPUs of each.")], 1.0),
    _keyword("gpus", Annotated[float, typer.Option("--gpus-per-actor", min=0, help="GPUs of each.")], 0.0),
)


@app.command("show")
def _show(
    table: Annotated[Path, typer.Argument(metavar="TABLE.parquet", help="A table that run has written.")],
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="How many rows to print.")] = 10,
    columns: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--columns", metavar="A,B,..", help="Print these columns, by default the telling ones."),
    ] = None,
) -> None:
    """Print the first rows of an output table."""
    import pyarrow
    import pyarrow.parquet

    from jfbatch.report import table as report_table

    if not table.is_file():
        what = "a directory, not a table" if table.is_dir() else "no such file"
        raise UsageError(f"{table}: {what}")
    try:
        # Opened here, as pyarrow takes no name that is not UTF-8.
        with open(table, "rb") as stream, pyarrow.parquet.ParquetFile(stream) as file:
            chosen = report_table.choose_columns(
                file.schema_arrow.names, columns.split(",") if columns else None
            )
            batch = next(file.iter_batches(batch_size=rows, columns=chosen), None)
            total = file.metadata.num_rows
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise InputError(str(table), f"cannot be read as a Parquet table ({error})") from None
    report_table.print_rows([] if batch is None else batch.to_pylist(), chosen, total)


@app.command("merge")
def _merge(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="What the shards were given as -o.")],
    inputs: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[INPUT...]", help="The input, where it lies elsewhere now."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write the rows that have a result, and keep the shards.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what is wrong.")] = False,
) -> int:
    """Make one table of the shards of a run, in input order, once every row of the input has its result.

    Exit codes: 0 all rows ok or shortened, 1 some rows are not or are missing (then nothing is written),
    2 usage, 65 damaged input, 74 the table cannot be written.
    """
    from jfbatch.cluster.merge import merge

    return merge(output, inputs or (), partial=partial, quiet=quiet)
