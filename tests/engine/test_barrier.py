"""Threads of kernels wait for each other, unless one gives up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from jfbatch.engine import barrier
from jfbatch.engine.barrier import Barrier

THREADS, MEETINGS = 4, 200


def test_nobody_goes_on_before_all_have_come() -> None:
    shared = Barrier()
    arrivals = [[] for _ in range(THREADS)]  # type: list[list[int]]

    def come(number: int) -> None:
        for meeting in range(1, MEETINGS + 1):
            arrivals[number].append(meeting)
            together = barrier.wait(shared.numbers, THREADS * meeting)
            if not together or any(len(others) < meeting for others in arrivals):
                shared.abort()
                raise AssertionError(meeting)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(come, range(THREADS)))


def test_who_waits_for_one_that_gave_up_is_told() -> None:
    shared = Barrier()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(barrier.wait, shared.numbers, 3) for _ in range(2)]
        shared.abort()
        assert [one.result(timeout=60) for one in waiting] == [False, False]
