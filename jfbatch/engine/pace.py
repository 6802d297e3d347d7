"""What a wider step costs on this device, and how likely a draft must be to be worth its place in it.

A step's time is about `fixed + per token * tokens`. A draft that comes true saves its row one step, that
is one row's share of the fixed part; one that does not costs a token. So with n rows in a step and a
fixed part worth h tokens, a draft of likelihood p pays if p h / n > 1 - p. Only speed depends on this.
"""

from __future__ import annotations

import torch

# The fixed part in tokens before anything was measured: weights read, small kernels launched.
_FIXED_CPU = 16.0
_FIXED_ACCELERATOR = 400.0
_LEAST, _MOST = 8.0, 4000.0
_PRIOR_STEPS = 8.0
_MEMORY = 200.0  # steps after which old ones count for little
_OUTLIER = 3.0  # a step this many times slower than expected says nothing: something else ran
# A row's step saved shortens the run only where that row is waited for. Where text jumps, drafts at cost
# price are taken all the same: they cost a hundredth of the time and save a tenth of the passes.
_CAUTION, _CAUTION_WITH_JUMPS = 1.5, 1.0
_LOSS = 0.01  # share of the work that drafts may have cost in vain before they pause,
_START = 4  # and fixed parts of steps on top of it, for what a run learns at its start


class Pace:
    """Learns the fixed part from the steps' times, and keeps account of what drafts gave and cost.

    Work is counted in tokens; a position with logits counts for `logits_share` more (the LM head). jumps:
    whether rows jump over text that is determined.
    """

    def __init__(self, device: torch.device, logits_share: float, jumps: bool = True) -> None:
        self.logits_share = logits_share
        self._caution = _CAUTION_WITH_JUMPS if jumps else _CAUTION
        self._prior = _FIXED_CPU if device.type == "cpu" else _FIXED_ACCELERATOR
        self.fixed = self._prior
        self._sums = [0.0] * 5  # of 1, work, seconds, work^2, work * seconds over the steps
        self._per_token = 0.0  # seconds
        self._shortest = (float("inf"), 0.0)  # seconds and work of the step that took least
        self.work = 0.0  # of all steps, fixed parts included
        self.balance = 0.0  # work that drafts saved, less what they cost

    def price(self, rows: int) -> float:
        """What a token in vain costs in a step that decides for `rows`, where a row's step saved is worth 1.

        Infinite while drafts have cost more than they may.
        """
        if self.balance < -_LOSS * self.work - _START * self.fixed:
            return float("inf")
        return self._caution * rows * (1 + self.logits_share) / self.fixed

    def observe(self, tokens: int, logits: int, seconds: float, typical: bool = True) -> None:
        """A step took this long; nothing is learnt from one that is not `typical`."""
        work = tokens + self.logits_share * logits
        self.work += work + self.fixed
        expected = self._per_token * (work + self.fixed)
        if not typical or (expected and seconds > _OUTLIER * expected):
            return
        self._shortest = min(self._shortest, (seconds, work))
        keep = 1 - 1 / _MEMORY
        for index, term in enumerate((1.0, work, seconds, work * work, work * seconds)):
            self._sums[index] = self._sums[index] * keep + term
        self._fit()

    def _fit(self) -> None:
        """Least squares over the steps seen, with a few more that cost as expected beforehand.

        The fixed part cannot be more than the shortest step leaves for it: rows that grow longer while steps
        become narrower would else look as if steps cost the same whatever their width.
        """
        count, work, seconds, squares, products = self._sums
        prior = _PRIOR_STEPS / (count + _PRIOR_STEPS)
        mean_work, mean_seconds = work / count, seconds / count
        spread = squares / count - mean_work**2
        expected = mean_seconds / (mean_work + self._prior)
        if spread < (0.1 * mean_work) ** 2:  # steps of one size say nothing about others
            self._per_token = expected
            return
        slope = (products / count - mean_work * mean_seconds) / spread
        self._per_token = max(prior * expected + (1 - prior) * slope, 1e-12)
        points = (mean_seconds, mean_work), self._shortest
        fixed = min(seconds / self._per_token - work for seconds, work in points)
        self.fixed = min(max(fixed, _LEAST), _MOST)

    def settle(self, rows: int, saved: int, lost: int) -> None:
        """In a step deciding for `rows`, drafts saved `saved` of their steps; `lost` tokens were in vain."""
        self.balance += saved * self.fixed / rows - lost * (1 + self.logits_share)
        self.balance = min(self.balance, _LOSS * self.work)  # old merits do not pay for new losses
