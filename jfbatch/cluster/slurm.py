"""`jfbatch slurm`: sbatch scripts for an array of shards and the merge that waits for it.

The scripts are meant to be read and kept: submitting them again continues. What goes into them was learned
on a real Slurm; each such line says why it is there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jfbatch.errors import OutputError, UsageError

_SIGNAL_SECONDS = 120
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_ARRAY = re.compile(r"(?:1-)?(\d{1,6})(%\d{1,6})?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_OURS = re.compile(r"-[ad].*|--(array|dependency|parsable|signal|wrap)(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class SlurmRequest:
    """What is asked of Slurm. `extra` are further arguments of sbatch, for the array and for the merge."""

    shards: int
    throttle: str
    gpus: int
    time: str
    partition: str | None = None
    extra: tuple[str, ...] = ()

    @staticmethod
    def parse(
        array: str, gpus: int, time: str, partition: str | None = None, extra: Sequence[str] = ()
    ) -> SlurmRequest:
        """Checks what was given. `array` is N, 1-N or N%M (M at a time). Raises UsageError."""
        match = _ARRAY.fullmatch(array)
        if match is None or int(match[1]) < 1:
            raise UsageError(
                f"--array: {array!r} is no number of shards: give N, such as 8, or N%M to run M at a time"
            )
        if seconds_of(time) is None:
            raise UsageError(f"--time: {time!r} is none of Slurm's: give minutes, H:MM:SS or D-HH:MM:SS")
        if partition is not None and _CONTROL.search(partition):
            raise UsageError(f"--partition: {partition!r} has a control character: give a partition's name")
        for argument in extra:
            if argument.startswith("-") and _OURS.fullmatch(argument):
                raise UsageError(
                    f"{argument}: jfbatch sets this itself; edit the scripts where it must be other"
                )
            if not argument.startswith("-") and (argument.endswith((".sh", ".sbatch"))):
                raise UsageError(f"{argument}: after -- come options of sbatch, not a script")
        return SlurmRequest(int(match[1]), match[2] or "", gpus, time, partition, tuple(extra))

    @property
    def signal_seconds(self) -> int:
        """How long before its time limit a job is told: not so long that a short job is told at once.

        Slurm rounds the limit up to whole minutes.
        """
        minutes = -(-(seconds_of(self.time) or 0) // 60)
        return min(_SIGNAL_SECONDS, minutes * 60 // 4)


@dataclass(frozen=True)
class Scripts:
    """The files that were written: the array, the merge, and the two sbatch commands."""

    array: Path
    merge: Path
    submit: Path


def seconds_of(time: str) -> int | None:
    """A time limit in Slurm's spelling, in seconds; None where it is none."""
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return total or None


def write_scripts(output: Path, run_arguments: Sequence[str], request: SlurmRequest) -> Scripts:
    """Writes the scripts to OUTPUT.slurm. `run_arguments` are those of `jfbatch run`. Raises OutputError."""
    directory = Path(os.path.abspath(output.with_name(output.name + ".slurm")))
    for text in (str(directory), os.getcwd(), *request.extra):
        if _CONTROL.search(text):
            raise UsageError(
                f"{text!r}: a line end or another control character in a path or an sbatch argument cannot "
                "be written to a script"
            )
    scripts = Scripts(*(directory / name for name in ("array.sh", "merge.sh", "submit.sh")))
    texts = {
        scripts.array: _array_script(output, directory, run_arguments, request),
        scripts.merge: _merge_script(output, directory, request),
        scripts.submit: _submit_script(scripts, request),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
    except OSError as error:
        raise OutputError(f"cannot write {directory}: {error.strerror or error}") from None
    return scripts


def submit(scripts: Scripts) -> int:
    """Submits both jobs; sbatch's exit code. Raises UsageError where there is no Slurm."""
    if shutil.which("sbatch") is None:
        raise UsageError(
            f"--submit: there is no sbatch here: run {scripts.submit} on a machine of the cluster"
        )
    return subprocess.run(["bash", str(scripts.submit)], check=False).returncode


def _array_script(output: Path, directory: Path, run_arguments: Sequence[str], request: SlurmRequest) -> str:
    gpus = [f"#SBATCH --gpus={request.gpus}"] if request.gpus else []
    command = [*_program(), "run", *run_arguments]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Shards 1 to {request.shards} of {output}, one for each element of the array.",
            "# Whatever ends one, requeueing or submitting it again continues: nothing depends on job ids.",
            f"#SBATCH --job-name={_quoted(f'jfbatch {output.name}')}",
            f"#SBATCH --array=1-{request.shards}{request.throttle}",
            *gpus,
            *_limits(request),
            "# Before its time is over the program is told to stop. Slurm tells only the batch shell, so the",
            "# program takes its place (exec); it commits what is finished and has itself requeued.",
            f"#SBATCH --signal=B:TERM@{request.signal_seconds}",
            "# After preemption and the failure of a node Slurm requeues it.",
            "#SBATCH --requeue",
            "# The log of an earlier start is kept.",
            "#SBATCH --open-mode=append",
            f"#SBATCH --output={_quoted(_log(directory, 'array-%a.log'))}",
            "",
            "set -eu",
            f"cd {shlex.quote(os.getcwd())}",
            'echo "shard $SLURM_ARRAY_TASK_ID on $SLURMD_NODENAME, start $((${SLURM_RESTART_COUNT:-0} + 1))"',
            f"exec {_shell_lines(command)} \\",
            f'    --shard "$SLURM_ARRAY_TASK_ID/{request.shards}" --requeue',
            "",
        ]
    )


def _merge_script(output: Path, directory: Path, request: SlurmRequest) -> str:
    return "\n".join(
        [
            "#!/bin/bash",
            "# One table of all shards. It starts when the last element has ended, well or not (with 1 if",
            "# rows failed), checks that no row is missing, and says which shard lacks which.",
            f"#SBATCH --job-name={_quoted(f'jfbatch {output.name} merge')}",
            *_limits(request),
            "#SBATCH --kill-on-invalid-dep=yes",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            f"#SBATCH --output={_quoted(_log(directory, 'merge.log'))}",
            "",
            "set -eu",
            f"cd {shlex.quote(os.getcwd())}",
            f"exec {shlex.join([*_program(), 'merge', _not_a_flag(output)])}",
            "",
        ]
    )


def _submit_script(scripts: Scripts, request: SlurmRequest) -> str:
    extra = "".join(f" {shlex.quote(argument)}" for argument in request.extra)
    return "\n".join(
        [
            "#!/bin/bash",
            "# Submits the array and the merge that waits for it. --parsable prints ID or ID;CLUSTER.",
            "set -eu",
            f"array=$(sbatch --parsable{extra} {shlex.quote(str(scripts.array))})",
            f'merge=$(sbatch --parsable{extra} --dependency="afterany:${{array%%;*}}" '
            f"{shlex.quote(str(scripts.merge))})",
            'echo "array job ${array%%;*}, merge job ${merge%%;*}"',
            "",
        ]
    )


def _limits(request: SlurmRequest) -> list[str]:
    partition = [f"#SBATCH --partition={_quoted(request.partition)}"] if request.partition else []
    return [f"#SBATCH --time={request.time}", *partition]


def _program() -> list[str]:
    """This Python, so that a virtual environment need not be activated on the nodes."""
    return [sys.executable, "-m", "jfbatch"]


def _not_a_flag(path: Path) -> str:
    return f"./{path}" if str(path).startswith("-") else str(path)


def _log(directory: Path, name: str) -> str:
    """A file name pattern of sbatch, in which % begins a replacement and a backslash ends them."""
    return str(directory).replace("%", "%%") + "/" + name


def _quoted(text: str) -> str:
    """A value in an #SBATCH line, which sbatch splits at spaces as a shell would, without expansions."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _shell_lines(command: Sequence[str]) -> str:
    """The command in lines that a person can read: a new one for each flag."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and len(word) > 2:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(line) for line in lines)
