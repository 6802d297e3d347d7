"""The step loop: admit, run, accept, jump, retire.

Requests come from a source that never blocks; Completions leave in the order in which rows finish.
A step runs one packed forward pass and then decides, for every row whose logits are there, one
token after another until the row needs tokens that were not computed. On a device of its own the next
pass may begin before the choices are read (ahead.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jfbatch.engine.ahead import Ahead, Pass, late_tokens
from jfbatch.engine.configuration import EngineConfig, EngineStatistics
from jfbatch.engine.device_choice import DeviceChooser
from jfbatch.engine.drafts import LONGEST, Drafter
from jfbatch.engine.jump import Jumper
from jfbatch.engine.memory import is_out_of_memory
from jfbatch.engine.pace import Pace
from jfbatch.engine.repetition import REPETITION, is_repeating
from jfbatch.engine.retokenize import Retokenizer, Tokenization
from jfbatch.engine.runner import Runner
from jfbatch.engine.sampler import Choices, Chooser, Chosen, HostChooser
from jfbatch.engine.scheduler import Planned, Scheduler
from jfbatch.engine.sequence import Completion, Reason, Request, Sequence
from jfbatch.engine.step_times import StepTimes, marks_of
from jfbatch.engine.watching import Span, watched
from jfbatch.engine.window import Window, still_open, windows_of
from jfbatch.errors import GrammarError, JfbatchError

__all__ = ["Engine", "EngineConfig", "EngineStatistics", "RequestSource"]

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.05
_MOST_IDLE_STEPS = 50


class RequestSource(Protocol):
    """Where the engine gets its rows from; only rows whose grammar is ready."""

    def take(self, limit: int) -> list[Request]:
        """At most `limit` requests that are ready now, without blocking."""
        ...

    def exhausted(self) -> bool:
        """Whether no request will come any more."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when a request may be ready, after `seconds` at the latest."""
        ...


@dataclass
class Engine:
    """Decodes requests on one runner. `tokenization` is the model's; `span` times the parts of a step."""

    runner: Runner
    tokenization: Tokenization
    config: EngineConfig = field(default_factory=EngineConfig)
    span: Span = nullcontext

    def __post_init__(self) -> None:
        self.statistics = EngineStatistics()
        retokenizer = Retokenizer(self.tokenization, self.runner.vocabulary_size)
        self._jumper = Jumper(self.tokenization, retokenizer, self.span)
        self._jump = watched(self.span, "jump", self._jumper.jump)
        self._drafter = Drafter(self.tokenization, retokenizer, LONGEST if self.config.drafts else 0)
        self._pace = Pace(self.runner.device, self.runner.logits_share, self.config.jump)
        self._times = StepTimes(marks_of(self.runner.device))
        config, runner = self.config, self.runner
        self._scheduler = Scheduler(
            runner.pool, config.batch_size, config.prefill_chunk, config.kv_memory, runner.steady
        )
        self._ahead = self._make_ahead()
        self._finished: list[Completion] = []
        self._retiring: list[Sequence] = []
        self._stopped = False
        self._place: tuple[int, int, int] | None = None
        self._standstill = 0  # steps since the running rows last moved
        self._ran_out_alone: set[str] = set()  # keys of rows for which memory ran out with no other running

    def _make_ahead(self) -> Ahead:
        runner, wanted = self.runner, self.config.ahead
        if runner.device.type == "cpu" and not wanted:  # nothing runs beside the host
            chooser: Chooser = HostChooser(self.config.log_probabilities)
            return Ahead(False, chooser, runner.device, self.statistics)
        chooser = DeviceChooser(runner.device, runner.vocabulary_size, self.config.log_probabilities)
        return Ahead(wanted if runner.takes_late_tokens else False, chooser, runner.device, self.statistics)

    def stop(self) -> None:
        """Finish nothing more: `run` ends before its next step. Safe to call from a signal handler."""
        self._stopped = True

    def run(self, source: RequestSource) -> Iterator[Completion]:
        """Decode every request of `source`; rows leave in the order in which they finish."""
        while not self._stopped:
            with self.span("fetch"):
                self._fetch(source)
            if self._scheduler.waiting or self._scheduler.running:
                with self.span("step"):
                    self.step()
            elif source.exhausted():
                break
            elif not self._finished:
                with self.span("wait"):
                    source.wait(_IDLE_SECONDS)
            yield from self._hand_over()
        self._times.settle(wait=True)
        yield from self._hand_over()

    @torch.inference_mode()
    def step(self) -> None:
        """One forward pass over everything that can run, and all decisions its logits allow."""
        try:
            self._advance()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        else:
            return
        # Outside the handler: its traceback would keep the step's tensors alive.
        self._start_again_smaller()

    def _advance(self) -> None:
        current = self._ahead.take() or self._compute()
        windows = windows_of(current.planned, current.late)
        self.statistics.rows_in_vain += len(current.late) - sum(window.is_of_use for window in windows)
        undecided = windows
        while undecided := still_open(undecided):
            self._decide(undecided, current)
        self._settle(windows)
        self._times.settle()
        self._give_up_on_a_standstill()
        with self.span("retire"):
            self._retire()
        self.statistics.shared_tokens = self._scheduler.shared_tokens

    def _retire(self) -> None:
        """Free the places of the rows that have ended."""
        for row in self._retiring:
            if row in self._ahead.late:  # it ended with its last token; what comes of that, nobody reads
                place = row.cached = min(row.cached, self._ahead.late[row])
                self.runner.pool.drop(row.slot, place)
        self._scheduler.retire(self._retiring, moving=not self._ahead.late)
        self._retiring.clear()

    def _give_up_on_a_standstill(self) -> None:
        """Fail the running rows if none has moved for many steps: a fault must not run for ever."""
        running = self._scheduler.running
        place = (len(running), sum(row.certain for row in running), sum(row.cached for row in running))
        self._standstill = self._standstill + 1 if place == self._place else 0
        self._place = place
        if self._standstill >= _MOST_IDLE_STEPS:
            for row in [row for row in running if row not in self._retiring]:
                self._finish(row, "failed", "internal error: the engine made no progress on this row")

    def _hand_over(self) -> Iterator[Completion]:
        finished, self._finished = self._finished, []
        yield from finished

    # Rows come in

    def _fetch(self, source: RequestSource) -> None:
        """Start what the source has ready, up to the look-ahead."""
        places = self._scheduler.batch_size - len(self._scheduler.running)
        limit = self.config.look_ahead + places - len(self._scheduler.waiting)
        if limit > 0:
            started = (self._start(request) for request in source.take(limit))
            self._scheduler.add([sequence for sequence in started if sequence is not None])

    def _start(self, request: Request) -> Sequence | None:
        """A Sequence with its first forced tokens; None if the row is done or has failed already."""
        room = self.config.context_length - len(request.prompt_ids)
        sequence = Sequence(request, min(request.max_tokens, room), can_jump=self.config.jump)
        try:
            if fault := self._cannot_start(sequence, room):
                self._finish(sequence, "failed", fault)
                return None
            if request.matcher.is_finished():
                self._finish(sequence, "finished")
                return None
            needed = self._jumper.tokens_to_end(sequence)
            if needed is None or needed > sequence.limit:
                self._finish(sequence, "failed", _ending_fault(needed, sequence, room))
                return None
            if self._jumper.jump(sequence):
                self._finish(sequence, "finished")
                return None
        except JfbatchError as error:
            self._finish(sequence, "failed", str(error))
            return None
        return sequence

    def _cannot_start(self, sequence: Sequence, room: int) -> str | None:
        if not sequence.prompt_tokens:
            return "the prompt has no tokens"
        if room < 1:
            return (
                f"the prompt has {sequence.prompt_tokens} tokens; the model's context of "
                f"{self.config.context_length} leaves no room for an output"
            )
        if sequence.request.max_tokens < 1:
            return "max_tokens is less than 1"
        needed, have = self._scheduler.kv_bytes(1, sequence.longest), self.config.kv_memory
        if needed > have:
            return f"the row needs {needed >> 20} MiB of KV memory at its longest; there are {have >> 20} MiB"
        return None

    # One forward pass

    def _plan(self, plan: Callable[[], list[Planned]], late: Mapping[Sequence, int]) -> list[Planned]:
        """A pass's plan, in which the rows that decide have what is worth verifying on the way."""
        with self.span("plan"):
            self._scheduler.admit(moving=not late)
            planned = plan()
        if not self.config.drafts:
            return planned
        with self.span("draft"):
            deciding = [part.sequence for part in planned if part.decides]
            price = self._pace.price(len(deciding))
            for sequence in deciding:
                if sequence not in late:
                    self._drafter.draft(sequence, price)
        with self.span("plan"):
            return plan()

    def _settle(self, windows: list[Window]) -> None:
        """Account for what the step's drafts gave and cost."""
        if windows:
            saved = sum(max(window.decisions - 1, 0) for window in windows)
            self._pace.settle(len(windows), saved, sum(window.lost for window in windows))
            self._ahead.settle(len(windows), saved)

    def _compute(self) -> Pass:
        """A pass over everything that can run."""
        self._ahead.launching()
        return self._launch(self._scheduler.plan, {}, None)

    def _go_ahead(
        self, undecided: list[Window], windows: list[Window], chosen: Chosen
    ) -> Mapping[Sequence, int]:
        """Launch the next pass, if that pays.

        Returns the rows that go on in it with what is being chosen for `windows`, by their indices there.
        """
        late = self._ahead.rows(windows) if not self._scheduler.is_sparse else {}
        if not late:
            return late
        sitting_out = {window.sequence for window in undecided}
        foresight = self._ahead.foresee(late, chosen)
        launched = self._launch(partial(self._scheduler.plan, sitting_out, late), late, chosen)
        self._ahead.launched(launched, foresight)
        return late

    def _launch(
        self, plan: Callable[[], list[Planned]], late: Mapping[Sequence, int], chosen: Chosen | None
    ) -> Pass:
        """A forward pass over what is planned, in which `late` rows go on with what is `chosen`."""
        planned = self._plan(plan, late)
        with self.span("forward"):
            return Pass(planned, self._forward(planned, late, chosen), late)

    def _forward(self, planned: list[Planned], late: Mapping[Sequence, int], chosen: Chosen | None) -> Tensor:
        """The pass's logits."""
        segments = [part.segment for part in planned]
        tokens = late_tokens(planned, late, chosen.token_ids) if chosen is not None else None
        with self._times.measured() as marks:
            logits = self.runner.forward(segments, tokens) if tokens else self.runner.forward(segments)
        prefill, decode = self.statistics.account(planned, late)
        observe = partial(self._observe, prefill, decode, len(logits), self.runner.typical)
        self._times.tell(marks, observe)
        return logits

    def _observe(self, prefill: int, decode: int, logits: int, typical: bool, seconds: float) -> None:
        """A step of so many tokens of prompts and outputs took this long."""
        self.statistics.add_time(seconds, prefill, decode)
        self._pace.observe(prefill + decode, logits, seconds, typical)

    def _start_again_smaller(self) -> None:
        """Memory ran out: half as many rows at a time, and the running ones start again."""
        self._ahead.forget()
        evicted = [row for row in self._scheduler.evict_all() if row not in self._retiring]
        self._retiring.clear()
        self.statistics.out_of_memory += 1
        self.runner.give_back()
        if len(evicted) == 1:
            key = evicted[0].request.key
            if key in self._ran_out_alone:
                self._finish(evicted[0], "failed", "memory ran out twice on this row alone")
                self._retiring.clear()
                return
            self._ran_out_alone.add(key)
        self._scheduler.batch_size = max(1, len(evicted) // 2)
        logger.warning(
            "memory ran out with %d rows; going on with %d at a time",
            len(evicted),
            self._scheduler.batch_size,
        )
        restarted = []
        for sequence in evicted:
            sequence.matcher.rollback(sequence.output_tokens)
            restarted.append(self._start(sequence.request))
        self._scheduler.add([sequence for sequence in restarted if sequence is not None])

    # Decisions

    def _decide(self, undecided: list[Window], current: Pass) -> None:
        """Choose the next token of each window's row, accept it and jump."""
        with self.span("mask"):
            masks = self._masks(undecided)
        windows = [window for window in undecided if window.open]
        rows = [window.row for window in windows if window.row is not None]
        if not rows:
            return
        with self.span("choose"):
            chosen = self._ahead.choose(current, windows, masks, rows)
        with self.span("ahead"):
            late = self._go_ahead(undecided, windows, chosen)
        with self.span("choose"):
            choices = self._ahead.read(chosen)
        with self.span("accept"):
            for index, window in enumerate(windows):
                if window.sequence in late:
                    window.sequence.computes_late(int(choices.token_ids[index]))
                state = self._ahead.state(window)
                self._take_choice(window, choices, index)
                self._ahead.learn(state, window)

    def _take_choice(self, window: Window, choices: Choices, index: int) -> None:
        """Accept what was chosen for a window's row, or fail the row where nothing could be."""
        sequence = window.sequence
        if index in choices.failures:
            place = f"at output token {sequence.output_tokens}"
            window.open = not self._finish(sequence, "failed", f"{choices.failures[index]} ({place})")
            self.runner.pool.erase(sequence.slot)  # its K and V may be no numbers
            sequence.forget()
            return
        if choices.log_probabilities is not None:
            sequence.log_probability = (sequence.log_probability or 0.0) + float(
                choices.log_probabilities[index]
            )
        window.decisions += 1
        window.open = not self._accept_or_fail(sequence, int(choices.token_ids[index]))

    def _masks(self, windows: list[Window]) -> list[NDArray[np.uint32]]:
        """uint32 [words] for each row whose matcher gives a mask; the others fail and close."""
        masks = []
        for window in windows:
            try:
                masks.append(window.sequence.matcher.token_mask())
            except JfbatchError as error:
                window.open = not self._finish(window.sequence, "failed", str(error))
        return masks

    def _accept_or_fail(self, sequence: Sequence, token_id: int) -> bool:
        """Accept the model's choice; whether the row is done."""
        sequence.sampled_tokens += 1
        self.statistics.sampled_tokens += 1
        place, start = sequence.certain, len(sequence.text)
        drafted = place < len(sequence.token_ids)
        try:
            done = self._accept(sequence, token_id)
        except JfbatchError as error:
            return self._finish(sequence, "failed", str(error))
        if drafted:
            accepted = sequence.cached > place
            self.statistics.accepted_drafts += accepted
            self._drafter.record(sequence, place, accepted)
        self._drafter.learn(sequence, start, token_id)
        return done

    def _accept(self, sequence: Sequence, token_id: int) -> bool:
        if token_id in self.tokenization.end_ids:
            return self._finish(sequence, "finished")
        matcher = sequence.matcher
        matcher.accept_token(token_id)
        sequence.append(token_id, self.tokenization.token_bytes(token_id))
        if matcher.is_finished():
            return self._finish(sequence, "finished")
        if not self._jumper.can_end_in_time(sequence):
            matcher.rollback(1)
            sequence.truncate(sequence.output_tokens - 1)
            self._jumper.take_ending(sequence)
            return self._finish(sequence, "shortened")
        if sequence.tokens_left == 0:
            return self._finish(sequence, "shortened")
        if self.config.repetition_stop and self._stops_repeating(sequence):
            return self._finish(sequence, "shortened", REPETITION)
        return self._jump(sequence) and self._finish(sequence, "finished")

    def _stops_repeating(self, sequence: Sequence) -> bool:
        """Complete an output that goes round in circles; False where there is nothing to stop."""
        if not is_repeating(sequence.token_ids, sequence.prompt_tokens, sequence.certain):
            return False
        try:
            self._jumper.take_ending(sequence)
        except GrammarError:  # it cannot end here, and goes on to its limit
            return False
        return True

    def _finish(self, sequence: Sequence, reason: Reason, error: str | None = None) -> bool:
        self._finished.append(sequence.completion(reason, error))
        self.statistics.jumped_tokens += sequence.jumped_tokens
        self._retiring.append(sequence)
        return True


def _ending_fault(needed: int | None, sequence: Sequence, room: int) -> str:
    if needed is None:
        return "the tokenizer cannot write the shortest text that the grammar allows"
    if sequence.limit < sequence.request.max_tokens:
        return f"the shortest output needs {needed} tokens; the prompt leaves {room} of the model's context"
    return f"the shortest output needs {needed} tokens; max_tokens is {sequence.request.max_tokens}"
