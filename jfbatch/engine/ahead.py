"""Being a step ahead of the host: the next pass begins before the choices that it goes on with are read.

What a row goes on with is usually the one token that the device has just chosen. So the device computes
that token next, while the host reads the choice, moves the grammar along, jumps and ends rows. A row that
goes on in another way has computed a token in vain, as with a draft that is not accepted: no output
depends on it.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jfbatch.engine.configuration import EngineStatistics
from jfbatch.engine.device_choice import DeviceChooser
from jfbatch.engine.early import Early, Foresight, draw_of, together
from jfbatch.engine.runner import LateTokens
from jfbatch.engine.sampler import Choices, Chooser, Chosen
from jfbatch.engine.scheduler import Planned
from jfbatch.engine.sequence import Sequence as Row
from jfbatch.engine.transfer import on_device
from jfbatch.engine.transitions import Transitions
from jfbatch.engine.window import Window

_LAST = 9  # steps that medians are of
_LEARNT_FROM = 3  # steps that must have been measured before any goes ahead
_AGAIN = 64  # after so many steps with passes ahead one without, to measure how long it takes now
_MOST_STATES = 1 << 16
_PRIOR, _PRIOR_CHOICES = 0.7, 2.0  # how likely it is beforehand that a row goes on with its choice alone


@dataclass
class Pass:
    """A forward pass that was launched: its plan and its logits.

    late: the rows that compute a token which the host did not know then -> their row among the choices.
    early: what the device has chosen from the logits already.
    """

    planned: list[Planned]
    logits: Tensor
    late: Mapping[Row, int] = field(default_factory=dict)
    early: Early | None = None


def late_tokens(planned: Sequence[Planned], late: Mapping[Row, int], token_ids: Tensor) -> LateTokens:
    """Where the late rows' tokens are in a plan, and what they are: some of the choices `token_ids`."""
    places, rows, offset = [], [], 0
    for part in planned:
        if part.sequence in late:
            places.append(offset)
            rows.append(late[part.sequence])
        offset += len(part.segment.token_ids)
    if rows != list(range(len(token_ids))):
        token_ids = token_ids.index_select(0, on_device(rows, torch.int64, token_ids.device))
    return LateTokens(places, token_ids)


def logits_positions(planned: Sequence[Planned]) -> dict[Row, int]:
    """Row -> where the first of its logits is."""
    positions, offset = {}, 0
    for part in planned:
        positions[part.sequence] = offset
        offset += len(part.segment.logits)
    return positions


class Habits:
    """How often rows went on with their choice alone, by the state of the grammar in which it was made."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # choices, those that went on
        self._share = _PRIOR

    def learn(self, state: Hashable | None, went_on: bool) -> None:
        """A row made a choice in this state (None: not known) and went on with it alone, or did not."""
        self._share += 0.01 * (went_on - self._share)
        if state is None:
            return
        made, before = self._counts.pop(state, (0, 0))
        self._counts[state] = made + 1, before + went_on
        if len(self._counts) > _MOST_STATES:
            self._counts.popitem(last=False)

    def likelihood(self, state: Hashable | None) -> float:
        """That a row which chooses in this state goes on with its choice alone."""
        made, went_on = self._counts.get(state, (0, 0))
        return (went_on + _PRIOR_CHOICES * self._share) / (made + _PRIOR_CHOICES)


class Clock:
    """How long steps take, as medians of the last ones, in seconds.

    A step alone launches its pass and waits for the choices; in a step ahead the next pass is under way
    before that, so that it takes as long as what is longer, the host's work or the device's.
    """

    def __init__(self) -> None:
        self._alone, self._device, self._host, self._saved = (deque[float](maxlen=_LAST) for _ in range(4))

    def alone(self, seconds: float, device: float, saved: float) -> None:
        """A step alone; it waited for its choices until `device` after the launch.

        saved: what drafts saved in it, in steps of a row.
        """
        self._alone.append(seconds)
        self._device.append(device)
        self._saved.append(saved)
        if self._host:  # what was measured ahead grows old
            self._host.popleft()

    def ahead(self, host: float) -> None:
        """A step ahead, less waiting."""
        self._host.append(host)

    def pays(self, going_on: float) -> bool:
        """Whether rows come on faster with a pass ahead; this share of them goes on with what it computes."""
        if len(self._alone) < _LEARNT_FROM:
            return False
        alone, device = median(self._alone), median(self._device)
        host = median(self._host) if self._host else alone - device
        return going_on * alone > (1 + fmean(self._saved)) * max(host, device)


class Ahead:
    """Decides which rows go ahead and when that pays, and holds the pass that is under way.

    wanted: always (True) or where it pays (None); without a DeviceChooser never.
    """

    def __init__(
        self, wanted: bool | None, chooser: Chooser, device: torch.device, statistics: EngineStatistics
    ) -> None:
        self._chooser = chooser
        self._statistics = statistics
        self.enabled = wanted is not False and isinstance(chooser, DeviceChooser)
        self.transitions = Transitions(device) if self.enabled else None
        # The state that a row left last, and by which token.
        self._moved: WeakKeyDictionary[Row, tuple[Hashable, int]] = WeakKeyDictionary()
        self.habits = Habits()
        self.clock = Clock()
        self._always = wanted is True
        self._streak = 0  # passes ahead since a step that had none was measured
        self._under_way: Pass | None = None
        self.late: dict[Row, int] = {}  # the rows that go ahead in it -> where their token is in the row
        self._began: float | None = None  # when the step began; None before the first
        self._launched: float | None = None  # when it launched its own pass, if it did and waits for that
        self._until_read: float | None = None  # how long ago that was when its choices came
        self._took = False  # whether its pass was under way already
        self._waited = self._saved = 0.0

    def take(self) -> Pass | None:
        """A step begins: the pass that is under way, to be decided on now."""
        if self.enabled:
            self._measure(time.perf_counter())
        taken, self._under_way, self.late = self._under_way, None, {}
        self._took = taken is not None
        return taken

    def _measure(self, now: float) -> None:
        """The step that was running is over."""
        if self._began is not None:
            seconds = now - self._began
            if self._until_read is not None:
                self.clock.alone(seconds, self._until_read, self._saved)
                self._streak = 0
            elif self._took and self._under_way is not None:
                self.clock.ahead(seconds - self._waited)
        self._began, self._launched, self._until_read = now, None, None
        self._waited = self._saved = 0.0

    def launching(self) -> None:
        """The step launches its own pass."""
        self._launched = time.perf_counter()

    def forget(self) -> None:
        """Nothing of what is under way is of use any more."""
        self._under_way, self.late = None, {}
        self._moved.clear()

    def foresee(self, late: Mapping[Row, int], chosen: Chosen) -> Foresight | None:
        """What the device knows of the masks that rows need after these choices; None if too little."""
        if self.transitions is None:
            return None
        return Foresight.of(late, chosen.token_ids, self.transitions)

    def launched(self, under_way: Pass, foresight: Foresight | None) -> None:
        """The next step's pass is under way."""
        self._under_way = under_way
        self.late = {
            part.sequence: part.segment.start for part in under_way.planned if part.sequence in under_way.late
        }
        self._launched = None
        self._statistics.rows_ahead += len(under_way.late)
        if foresight is not None and isinstance(self._chooser, DeviceChooser):
            positions = logits_positions(under_way.planned)
            under_way.early = foresight.choose(self._chooser, under_way.logits, positions)

    def choose(
        self,
        current: Pass,
        windows: Sequence[Window],
        masks: Sequence[NDArray[np.uint32]],
        rows: Sequence[int],
    ) -> Chosen:
        """One token for each window, from row `rows[i]` of the logits; what was chosen early stands."""
        draws = [draw_of(window.sequence) for window in windows]
        chooser = self._chooser
        if not isinstance(chooser, DeviceChooser):
            return chooser.choose(current.logits, masks, draws, rows)
        early = current.early
        known = early.usable(windows, masks, chooser) if early is not None else {}
        others = [index for index in range(len(windows)) if index not in known]
        chosen = None
        if others:
            chosen = chooser.choose(
                current.logits,
                [masks[index] for index in others],
                [draws[index] for index in others],
                [rows[index] for index in others],
            )
        self._note(windows, masks, chooser)
        if chosen is not None and (early is None or not known):
            return chosen
        assert early is not None
        self._statistics.chosen_early += len(known)
        number = {index: len(early.rows) + place for place, index in enumerate(others)} | known
        return together(early.chosen, chosen, [number[index] for index in range(len(windows))])

    def _note(
        self, windows: Sequence[Window], masks: Sequence[NDArray[np.uint32]], chooser: DeviceChooser
    ) -> None:
        """Let the device know of the rows' last tokens and where they led."""
        for window, mask in zip(windows, masks, strict=True):
            moved = self._moved.pop(window.sequence, None)
            place = chooser.masks.place_of(mask) if moved else None
            if moved and place is not None and self.transitions is not None:
                self.transitions.note(*moved, place)

    def read(self, chosen: Chosen) -> Choices:
        """The choices, once the device has made them."""
        started = time.perf_counter()
        choices = chosen.fetch()
        now = time.perf_counter()
        self._waited += now - started
        if self._launched is not None and self._until_read is None:
            self._until_read = now - self._launched
        return choices

    def settle(self, rows: int, saved: int) -> None:
        """In this step drafts saved so many steps of its rows."""
        self._saved = saved / rows

    def state(self, window: Window) -> tuple[int, Hashable | None]:
        """Where a row stands before its choice is taken, for `learn`."""
        row = window.sequence
        return row.certain, row.matcher.state_key() if self.enabled else None

    def learn(self, before: tuple[int, Hashable | None], window: Window) -> None:
        """A row has taken its choice."""
        if self.enabled:
            row, (place, state) = window.sequence, before
            went_on = window.open and row.certain == place + 1
            self.habits.learn(state, went_on)
            if went_on and state is not None:
                self._moved[row] = state, row.token_ids[place]

    def rows(self, windows: Sequence[Window]) -> dict[Row, int]:
        """The rows that may go on with what is being chosen -> their places among `windows`.

        Empty where a pass is under way already, or where one would not pay.
        """
        if not self.enabled or self._under_way is not None:
            return {}
        late = {window.sequence: index for index, window in enumerate(windows) if _may_go_on(window)}
        if not late or self._always:
            return late
        expected = sum(self.habits.likelihood(row.matcher.state_key()) for row in late)
        goes = self._streak < _AGAIN and self.clock.pays(expected / len(windows))
        self._streak += goes
        return late if goes else {}


def _may_go_on(window: Window) -> bool:
    row = window.sequence
    return window.is_last and len(row.token_ids) == row.certain and row.tokens_left > 1
