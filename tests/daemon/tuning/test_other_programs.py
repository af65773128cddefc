"""The load of other programs, with a fake clock and given CPU times."""

from __future__ import annotations

import pytest

from inferd.daemon.tuning.measured_stages import OtherPrograms


class Machine:
    """A machine on which other programs use *loads* cores, one in each window."""

    def __init__(self, *loads: float, own: float = 1.0):
        self.now = self.busy_s = self.own_s = 0.0
        self._loads, self._own = list(loads), own

    def sleep(self, seconds: float) -> None:
        load = self._loads.pop(0) if len(self._loads) > 1 else self._loads[0]
        self.now += seconds
        self.own_s += seconds * self._own
        self.busy_s += seconds * (load + self._own)

    def others(self) -> OtherPrograms:
        return OtherPrograms(lambda: self.now, self.sleep, lambda: self.busy_s, lambda: self.own_s)


def test_an_idle_machine_is_not_waited_for() -> None:
    machine, told = Machine(0.05), list[float]()
    assert machine.others().wait_until_idle(20, told.append) == pytest.approx(0.05)
    assert (machine.now, told) == (0.5, [])


def test_a_busy_machine_is_waited_for_until_it_is_idle() -> None:
    machine, told = Machine(2.0, 1.5, 0.1), list[float]()
    assert machine.others().wait_until_idle(20, told.append) == pytest.approx(0.1)
    assert machine.now == 1.5 and told == [pytest.approx(2.0)]


def test_a_wait_ends_at_its_time() -> None:
    machine, told = Machine(2.0), list[float]()
    assert machine.others().wait_until_idle(3, told.append) == pytest.approx(2.0)
    assert machine.now == 3.0 and len(told) == 1


def test_the_load_of_the_measurement_itself_does_not_count() -> None:
    machine = Machine(0.0, own=2.0)
    others = machine.others()
    machine.sleep(5)
    assert others.cores() == 0.0
