"""Times of steps are told in order, once they are known, and never waited for but at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from jfbatch.engine.step_times import HostMark, Mark, StepTimes, marks_of


class Device:
    """Does one thing after another, but only as far as the test lets it go; its clock counts them."""

    def __init__(self) -> None:
        self.told = 0  # things that it was told to do
        self.done = 0
        self.waits = 0

    def mark(self) -> Mark:
        return DeviceMark(self)


class DeviceMark:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = -1

    def record(self) -> None:
        self.place = self.device.told

    def happened(self) -> bool:
        return 0 <= self.place <= self.device.done

    def wait(self) -> None:
        self.device.waits += not self.happened()
        self.device.done = max(self.device.done, self.place)

    def seconds_since(self, earlier: DeviceMark) -> float:
        assert earlier.happened() and self.happened()
        return float(self.place - earlier.place)


def launched(times: StepTimes, device: Device, work: int, told: Callable[[float], None]) -> None:
    with times.measured() as marks:
        device.told += work
    times.tell(marks, told)


def test_a_step_s_time_is_the_device_s_and_told_when_it_is_done() -> None:
    device, told = Device(), list[float]()
    times = StepTimes(device.mark)
    launched(times, device, 5, told.append)
    launched(times, device, 2, told.append)
    assert told == []  # both are launched, neither is done
    device.done = 5
    times.settle()
    assert told == [5]
    device.done = 6
    times.settle()
    assert told == [5]
    launched(times, device, 1, told.append)
    assert (told, device.waits) == ([5], 0)
    times.settle(wait=True)
    assert (told, device.waits) == ([5, 2, 1], 2)


def test_a_step_that_failed_has_no_time() -> None:
    device, told = Device(), list[float]()
    times = StepTimes(device.mark)
    with pytest.raises(torch.OutOfMemoryError), times.measured():
        raise torch.OutOfMemoryError
    times.settle(wait=True)
    assert told == []


def test_on_a_cpu_a_time_is_known_at_once() -> None:
    told: list[float] = []
    times = StepTimes(marks_of(torch.device("cpu")))
    with times.measured() as marks:
        time.sleep(0.01)
    assert isinstance(marks[0], HostMark)
    times.tell(marks, told.append)
    assert len(told) == 1 and 0.01 <= told[0] < 1
