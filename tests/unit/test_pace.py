"""How many events a worker may handle now."""

from __future__ import annotations

import pytest

from sideline.engine.pace import Pace
from sideline.testing import FakeClock

LEASE_SECONDS = 2.0


def go_on():
    return False


def handled(pace, clock, rate, stopped=go_on):
    """One lease in which there is always something to handle: how many events that were."""
    until = clock.monotonic() + LEASE_SECONDS
    pace.begin(rate, until)
    count = 0
    while clock.monotonic() < until and not stopped():
        some = pace.allow(1_000, stopped)
        pace.spend(some)
        count += some
    return count


@pytest.mark.parametrize("rate", [0.01, 0.125, 0.4, 0.5, 1.0, 3.3, 100.0])
def test_leases_come_to_the_rate(rate):
    """Neither more nor less, also where an event takes several leases (rate=)."""
    clock = FakeClock()
    pace = Pace(clock, 0.0)
    leases = max(100, int(3 / rate))
    count = sum(handled(pace, clock, rate) for _ in range(leases))
    assert count == pytest.approx(leases * LEASE_SECONDS * rate, abs=1)


def test_several_slots_keep_the_rate_together():
    """Eight slots, one event a second, leases of two seconds: not one event a lease (rate=)."""
    count = 0
    for slot in range(8):
        clock = FakeClock()
        pace = Pace(clock, slot / 8)
        count += sum(handled(pace, clock, 1 / 8) for _ in range(50))
    assert count == pytest.approx(100, abs=1)


def test_workers_that_never_last_handle_what_they_should():
    """Where each lease has a new worker, and none is long enough for an event (rate=)."""
    count = 0
    for number in range(1_000):
        count += handled(Pace(clock := FakeClock(), number / 1_000), clock, 0.05)
    assert count == pytest.approx(1_000 * LEASE_SECONDS * 0.05, abs=1)


def test_what_was_spent_too_early_is_not_forgotten():
    """A lease that ends in debt is followed by one that pays it back (rate=)."""
    clock = FakeClock()
    pace = Pace(clock, 0.0)
    pace.begin(10, clock.monotonic() + LEASE_SECONDS)
    pace.spend(35)
    clock.advance(LEASE_SECONDS)
    assert pace.allow(1, go_on) == 0
    assert handled(pace, clock, 10) == pytest.approx(5, abs=1)


def test_what_was_not_used_is_no_store():
    """After an idle hour there is no more than a second's worth, and in a new lease none."""
    clock = FakeClock()
    pace = Pace(clock, 0.0)
    pace.begin(10, clock.monotonic() + 7_200)
    clock.advance(3_600)
    assert pace.allow(1_000, go_on) == 10
    pace.begin(10, clock.monotonic() + LEASE_SECONDS)
    assert pace.allow(1_000, go_on) == 1


def test_time_between_leases_earns_nothing():
    """Another worker has the slot then, and its share of the rate."""
    clock = FakeClock()
    pace = Pace(clock, 0.0)
    handled(pace, clock, 10)
    clock.advance(3_600)
    assert handled(pace, clock, 10) == pytest.approx(LEASE_SECONDS * 10, abs=1)


def test_a_stop_ends_the_wait():
    """At the next look, not when the event's time has come."""
    clock = FakeClock()
    pace = Pace(clock, 0.0)
    pace.begin(0.01, clock.monotonic() + 1_000)
    assert pace.allow(1, lambda: clock.monotonic() > 1) == 0
    assert clock.monotonic() < 1.5


def test_who_cannot_wait_gets_what_there_is():
    """Nothing is waited for while something finished has to be committed."""
    clock = FakeClock()
    pace = Pace(clock, 0.0)
    pace.begin(10, clock.monotonic() + LEASE_SECONDS)
    assert pace.allow(5, go_on, patient=False) == 0
    assert clock.monotonic() == 0
    clock.advance(0.3)
    assert pace.allow(5, go_on, patient=False) == 3


def test_without_a_rate_everything_may_come():
    """And nothing is waited for."""
    clock = FakeClock()
    pace = Pace(clock)
    pace.begin(None, clock.monotonic() + LEASE_SECONDS)
    assert pace.allow(1_000, go_on) == 1_000
    assert clock.monotonic() == 0
