"""`--devices`: one process per device over shards of one run; one progress line, and one table at the end.

The processes share nothing but the output's directory. One that dies is started once more, and continues
from its shard's parts; the others do not notice.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from jfbatch import job
from jfbatch.cluster.merge import merge_shards
from jfbatch.config import RunConfig
from jfbatch.errors import InputError, JfbatchError, UsageError
from jfbatch.report.progress import Progress, progress_text
from jfbatch.report.statistics import GOOD_STATUSES, RunStatistics, summed
from jfbatch.report.summary import print_summary
from jfbatch.rows.output_path import followed
from jfbatch.rows.parts import PartDirectory
from jfbatch.rows.shard import Shard
from jfbatch.rows.shard_directories import begun_shards, shard_path
from jfbatch.signals import Signals

_MOST_STARTS = 2
_STOPPED = (130, 143)
_EXTRA_GRACE = 5.0  # seconds beyond those that the workers have to stop in


class WorkerDied(JfbatchError):
    """A worker died twice at one shard; what was committed is intact."""


def devices_of(text: str, gpus: Callable[[], int]) -> list[str]:
    """The devices that `--devices` names, as for --device. Raises UsageError where there are none such."""
    if text.startswith("cpu:"):
        return ["cpu"] * int(text[4:])
    there = gpus()
    if there == 0:
        raise UsageError("--devices: there is no CUDA device here; cpu:N starts N processes on this CPU")
    numbers = list(range(there)) if text == "all" else [int(number) for number in text.split(",")]
    for number in numbers:
        if number >= there:
            raise UsageError(f"--devices: there is no device {number}; there are 0 to {there - 1}")
    if len(set(numbers)) != len(numbers):
        raise UsageError(f"--devices: {text} names a device twice")
    return [f"cuda:{number}" for number in numbers]


def count_gpus() -> int:
    """How many CUDA devices this process may use."""
    import torch  # it alone knows what CUDA_VISIBLE_DEVICES leaves

    return torch.cuda.device_count()


def share_of_memory(processes: int) -> int:
    """The KV memory of each of several processes on the CPU, which would all take what is free now."""
    import torch

    from jfbatch.engine.memory import spare_memory

    return max(spare_memory(torch.device("cpu")) // processes, 1)


def run_on_devices(config: RunConfig, forced_end: Callable[[int], None] | None = None) -> int:
    """Run the job, one process per device of `config.devices`; the exit code. Raises JfbatchError."""
    plan = job.check(config)
    check_for_devices(config)
    if "-" in config.inputs:
        raise UsageError("--devices: standard input cannot be read by several processes: name a file")
    gc.enable()  # the command line keeps it off while models are loaded, which workers do
    devices = devices_of(config.devices or "all", count_gpus)
    run = _Run(config, shards_for(config, plan.shard or Shard(1, 1, config.shard_by), len(devices)), devices)
    code = run.to_the_end(forced_end)
    if code is not None:
        return code
    statistics = run.statistics()
    if plan.shard is not None:
        finished, damage = dict(statistics.status_counts), None
    else:
        merged = merge_shards(plan.output)
        if merged.table is None and merged.damage is not None:
            raise merged.damage
        if merged.table is None:
            raise WorkerDied("; ".join(map(str, merged.missing)) + ": the same command continues")
        finished, damage = dict(merged.table.statuses), merged.damage
    print_summary(statistics, None if plan.shard else plan.output, quiet=config.quiet)
    good = all(status in GOOD_STATUSES for status, count in finished.items() if count)
    code = damage.exit_code if damage else 0 if good else 1
    job.write_summary(config, statistics, finished, code)
    if damage is not None:
        raise damage
    return code


def check_for_devices(config: RunConfig) -> None:
    """Raise UsageError on settings that do not go with `--devices`."""
    if config.device != "auto":
        raise UsageError("give either --device or --devices")
    if config.profile is not None:
        raise UsageError("--profile is of one process: leave out --devices")


def shards_for(config: RunConfig, whole: Shard, devices: int) -> tuple[Shard, ...]:
    """The shards to run: one for each device, or as many as an earlier start on other devices began."""
    pieces = devices
    assert config.output is not None
    begun = begun_shards(followed(config.output))
    if begun and begun[0].shard.count % whole.count == 0:
        pieces = begun[0].shard.count // whole.count
    return whole.parts(pieces)


@dataclass
class _Worker:
    """A process at a shard. `starts` counts those of the shard, this one included."""

    shard: Shard
    place: int
    starts: int
    process: subprocess.Popen[bytes]
    reading: int
    buffer: bytes = b""
    statistics: RunStatistics = field(default_factory=RunStatistics)
    code: int | None = None
    error: str | None = None


class _Run:
    """The processes of one run, from the first start to the last end."""

    def __init__(self, config: RunConfig, shards: tuple[Shard, ...], devices: list[str]) -> None:
        self.config = config
        self.devices = devices
        self.shards = shards
        self.waiting = deque((shard, 1) for shard in shards)
        self.running: dict[int, _Worker] = {}
        self.ended: list[_Worker] = []
        self.lost: list[str] = []
        self.said: set[str] = set()
        self.selector = selectors.DefaultSelector()
        self.started = time.monotonic()
        self.stopping = False
        self.failure: _Worker | None = None
        self.cpu_kv_memory = share_of_memory(len(devices)) if "cpu" in devices else None

    def to_the_end(self, forced_end: Callable[[int], None] | None) -> int | None:
        """Until every shard is finished: None; or until something stops the run: its exit code."""
        with ExitStack() as stack:
            progress = stack.enter_context(Progress(quiet=self.config.quiet))
            signals = stack.enter_context(
                Signals(self.config.grace + _EXTRA_GRACE, self.status_line, forced_end)
            )
            stack.callback(self._let_go)
            signals.on_stop(lambda: self.stop(signals.received or 0))
            while self.running or (self.waiting and not self.stopping):
                self._start_waiting()
                for key, _ in self.selector.select(timeout=0.2):
                    self._read(key.data, progress)
                if self._too_many_failures() and not self.stopping:
                    self.stop()
                progress.update(self.statistics())
            return self._outcome(signals, progress)

    def stop(self, number: int = 0) -> None:
        """Hand a signal on: the workers commit what is finished and end."""
        self.stopping = True
        for worker in list(self.running.values()):
            if worker.process.poll() is None:
                worker.process.send_signal(number or 15)

    def statistics(self) -> RunStatistics:
        """What all workers have done, in this start."""
        latest = {worker.shard: worker.statistics for worker in [*self.ended, *self.running.values()]}
        missing = [RunStatistics() for _ in self.waiting]
        return summed([*latest.values(), *missing], time.monotonic() - self.started)

    def status_line(self) -> str:
        return progress_text(self.statistics())

    def _start_waiting(self) -> None:
        free = [place for place in range(len(self.devices)) if place not in self.running]
        for place in free:
            if self.waiting and not self.stopping:
                shard, starts = self.waiting.popleft()
                self._start(shard, place, starts)

    def _start(self, shard: Shard, place: int, starts: int) -> None:
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "jfbatch.cluster.worker", str(writing)],
            stdin=subprocess.PIPE,
            pass_fds=[writing],
            start_new_session=True,  # a Ctrl-C on the terminal is this process's to hand on
        )
        os.close(writing)
        os.set_blocking(reading, False)
        worker = _Worker(shard, place, starts, process, reading)
        self.running[place] = worker
        self.selector.register(reading, selectors.EVENT_READ, worker)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(self._order(shard, place)).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # it died at once: its end is read like any other
            return

    def _order(self, shard: Shard, place: int) -> dict[str, Any]:
        processors = processors_of(place, len(self.devices)) if self.devices[place] == "cpu" else []
        threads = self.config.threads or max(1, len(os.sched_getaffinity(0)) // len(self.devices))
        changed = {
            "shard": str(shard),
            "shard_by": shard.by,
            "device": self.devices[place],
            "devices": None,
            "threads": threads,
            "quiet": True,
            "summary_json": None,
            "requeue": False,
        }
        if self.devices[place] == "cpu" and self.config.kv_memory is None:
            changed["kv_memory"] = self.cpu_kv_memory
        config = self.config.model_copy(update=changed)
        return {"config": config.model_dump(mode="json", exclude_defaults=True), "processors": processors}

    def _read(self, worker: _Worker, progress: Progress) -> None:
        data = os.read(worker.reading, 1 << 16)
        worker.buffer += data
        *lines, worker.buffer = worker.buffer.split(b"\n")
        for line in lines:
            self._take(worker, json.loads(line), progress)
        if not data:
            self._ended(worker, progress)

    def _take(self, worker: _Worker, message: dict[str, Any], progress: Progress) -> None:
        if "statistics" in message:
            worker.statistics = RunStatistics(**message["statistics"])
        if "say" in message:
            if message["say"] not in self.said:  # all of them load the same model
                progress.say(message["say"])
            self.said.add(message["say"])
        if "code" in message:
            worker.code, worker.error = message["code"], message.get("error")

    def _ended(self, worker: _Worker, progress: Progress) -> None:
        self.selector.unregister(worker.reading)
        os.close(worker.reading)
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        status = worker.process.wait()
        del self.running[worker.place]
        if worker.code in (0, 1, InputError.exit_code) or (worker.code in _STOPPED and self.stopping):
            self.ended.append(worker)
            return
        if worker.error is not None:  # a mistake that every worker will meet, or a full disk
            self.ended.append(worker)
            self.failure = self.failure or worker
            self.stop()
            return
        how = f"exit code {status}" if status >= 0 else f"signal {-status}"
        what = f"the process of shard {worker.shard} on {self.devices[worker.place]} died ({how})"
        if self.stopping:
            self.ended.append(worker)
        elif worker.starts < _MOST_STARTS:
            progress.say(f"{what}: it is started again, and continues")
            self.waiting.appendleft((worker.shard, worker.starts + 1))
        else:
            self.ended.append(worker)
            self.lost.append(what)
            progress.say(f"{what}, the second time: the others go on")

    def _too_many_failures(self) -> bool:
        most = self.config.max_failures
        return most is not None and self.statistics().rows_failed_now >= most

    def _outcome(self, signals: Signals, progress: Progress) -> int | None:
        if self.failure is not None:
            raise _Failure(self.failure.error or "", self.failure.code or 1)
        if self.lost:
            raise WorkerDied(
                f"{'; '.join(self.lost)}: what is finished is kept, and the same command continues"
            )
        if not self.stopping or (not signals.received and self._all_done()):
            return None
        code = signals.exit_code or 1
        statistics = self.statistics()
        job.write_summary(self.config, statistics, statistics.status_counts, code, finished=False)
        why = "stopped" if signals.received else f"{self.config.max_failures} rows failed"
        progress.say(
            f"{why}: {statistics.rows_done:,} rows are committed beside {self.config.output}; "
            "the same command continues with the others"
        )
        return code

    def _all_done(self) -> bool:
        """Whether every shard got to its end, as when its last row was one failure too many."""
        assert self.config.output is not None
        output = followed(self.config.output)
        return all(PartDirectory(shard_path(output, shard)).is_done() for shard in self.shards)

    def _let_go(self) -> None:
        """After an error here: the ends of their stdin stop the workers."""
        for worker in self.running.values():
            assert worker.process.stdin is not None
            worker.process.stdin.close()
        for worker in self.running.values():
            worker.process.wait()


class _Failure(JfbatchError):
    """What a worker ended with, in its words."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def processors_of(place: int, count: int) -> list[int]:
    """The processors of worker `place` of `count`, so that each keeps its caches; [] where they share."""
    mine = sorted(os.sched_getaffinity(0))
    size = len(mine) // count
    return mine[place * size : (place + 1) * size]
