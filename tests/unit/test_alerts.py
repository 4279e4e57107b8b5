"""Which alerts a pipeline's rows call for: decided without a clock, a database or a broker."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline import Backoff, Pipeline, alerts
from sideline.alerts import Alerting, Key, Limits, Loss, Memory, Scene, Sight
from sideline.policies import Block, Skip

NOW = 1_000_000.0
NONE: dict[Key, str] = {}


@dataclasses.dataclass
class Row:
    topic: str = "users"
    partition: int = 0
    next_offset: int = 100
    attempts: int = 0
    trouble: str | None = None
    stuck_at: int | None = None
    paused: bool = False
    consumed: int = 100
    skipped: int = 0
    parked: int = 0
    aside: int = 0
    dead: int = 0
    unsent: int = 0
    outbox_trouble: str | None = None
    event_at: datetime | None = None


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class Watch:
    """Looks again and again, as a driver does, and keeps what is open."""

    def __init__(self, **limits) -> None:
        self.limits = Limits(**limits)
        self.memory = Memory(self.limits)
        self.open: dict[Key, str] = {}
        self.raised: list[Key] = []
        self.cleared: list[Key] = []

    def look(self, *rows: Row, now: float = NOW, **scene) -> set[Key]:
        sight = self.memory.see(Scene(rows, **scene), now)
        wanted = alerts.wanted(sight, self.limits, self.open)
        changes = alerts.compare(self.open, wanted)
        self.raised += changes.raised
        self.cleared += changes.cleared
        self.open = wanted
        return set(wanted)


# Dead letters and the outbox


def test_dead_events_are_an_alert_until_somebody_deals_with_them():
    """As many as there are, also of topics that are read no more (S2, F7)."""
    watch = Watch()
    watch.look(Row(dead=2), others=[Row(topic="old", dead=1)])
    assert watch.open == {Key("dead"): "3 events are dead: nobody tries them again by itself."}
    watch.look(Row())
    assert watch.cleared == [Key("dead")]


def test_an_outbox_that_is_refused_or_late_is_an_alert():
    """At once if Kafka said why, after a while if it did not (K23)."""
    watch = Watch()
    assert watch.look(Row(unsent=3)) == set()
    assert watch.look(Row(unsent=3, outbox_trouble="too large")) == {Key("outbox", "users/0")}
    assert watch.open[Key("outbox", "users/0")] == "3 records wait to be sent: too large"
    assert watch.look(Row()) == set()
    watch.look(Row(unsent=1), now=NOW + 10)
    assert watch.look(Row(unsent=1), now=NOW + 69) == set()
    assert watch.look(Row(unsent=1), now=NOW + 71) == {Key("outbox", "users/0")}


# Parked


def test_parked_events_are_counted_over_all_partitions():
    """One alert a pipeline says how far the sink is from its source (S1, S2)."""
    watch = Watch()
    watch.look(Row(parked=1_200, aside=30), Row(partition=1, parked=4, aside=7))
    assert watch.open == {Key("parked"): "1,204 events wait; 37 keys are aside."}


@pytest.mark.parametrize(
    ("parked", "aside", "words"),
    [
        (1, 1, "1 event waits; 1 key is aside."),
        (2, 0, "2 events wait."),
    ],
)
def test_few_parked_events_are_said_as_people_say_it(parked, aside, words):
    """Events without a key wait alone (S2)."""
    watch = Watch()
    watch.look(Row(parked=parked, aside=aside))
    assert watch.open[Key("parked")] == words


def test_parked_is_raised_once_while_its_numbers_change():
    """Worded anew, not raised again; cleared when nothing waits (S2)."""
    watch = Watch()
    for parked in (1, 2, 50, 3):
        watch.look(Row(parked=parked, aside=1))
    assert watch.raised == [Key("parked")]
    watch.look(Row())
    assert watch.cleared == [Key("parked")]
    assert watch.open == {}


def test_what_waits_of_a_topic_that_is_named_no_more_still_waits():
    """But nobody retries it, and its place on an event blocks nobody (S1)."""
    watch = Watch(retry=Backoff(alert_after=0), blocks=True)
    other = Row(topic="old", parked=2, attempts=9, trouble="x", stuck_at=4)
    assert watch.look(Row(parked=1), others=[other]) == {Key("parked")}
    assert watch.open[Key("parked")].startswith("3 events wait")


# Retrying


def test_a_partition_that_retries_is_an_alert_at_the_limit():
    """Not before `alert_after`, once, and over when the partition moves (F2, S2)."""
    watch = Watch(retry=Backoff(alert_after="1m"))
    stuck = Row(partition=3, attempts=2, trouble="OperationalError: away", stuck_at=100)
    for later in (0, 30, 59):
        assert watch.look(stuck, now=NOW + later) == set()
    stuck.attempts = 9
    assert watch.look(stuck, now=NOW + 60) == {Key("backoff", "users/3")}
    text = watch.open[Key("backoff", "users/3")]
    assert "more than 60 s" in text
    assert "users/3/100" in text
    assert "attempt 9" in text
    assert "OperationalError: away" in text
    watch.look(stuck, now=NOW + 500)
    watch.look(Row(partition=3), now=NOW + 501)
    assert watch.raised == [Key("backoff", "users/3")] == watch.cleared


def test_only_the_partition_that_retries_is_meant():
    """Others do not notice (K4)."""
    watch = Watch(retry=Backoff(alert_after=0))
    rows = Row(partition=1, attempts=1, trouble="x"), Row(partition=2)
    assert watch.look(*rows) == {Key("backoff", "users/1")}


def test_two_short_retries_are_not_a_long_one():
    """The time counts from the first failure after the last success (F2)."""
    watch = Watch(retry=Backoff(alert_after="1m"))
    stuck, well = Row(attempts=1, trouble="x"), Row()
    watch.look(stuck, now=NOW)
    watch.look(well, now=NOW + 40)
    assert watch.look(stuck, now=NOW + 50) == set()
    assert watch.look(stuck, now=NOW + 100) == set()
    assert watch.look(stuck, now=NOW + 110) == {Key("backoff", "users/0")}


def test_a_new_driver_knows_from_the_attempts_how_long_it_has_lasted():
    """A restart does not begin to wait for the alert anew (F2, S2)."""
    retry = Backoff(first="1s", factor=2, limit="10s", jitter=0, alert_after="30s")
    assert Watch(retry=retry).look(Row(attempts=4, trouble="x")) == set()
    # 1 + 2 + 4 + 8 + 10 + 10 seconds.
    assert Watch(retry=retry).look(Row(attempts=7, trouble="x")) == {Key("backoff", "users/0")}


def test_a_pause_that_never_grows_is_added_up_quickly():
    """A million attempts without a pause do not stop the driver."""
    retry = Backoff(first="1ms", limit=0, alert_after="1m")
    assert Watch(retry=retry).look(Row(attempts=10**6, trouble="x")) == set()


def test_a_paused_partition_raises_nothing_and_clears_nothing():
    """Nobody tries it, but what it stands on has not gone away (S2)."""
    watch = Watch(retry=Backoff(alert_after="1m"))
    row = Row(attempts=1, trouble="x", paused=True)
    watch.look(row, now=NOW)
    assert watch.look(row, now=NOW + 100) == set()
    row.paused = False
    assert watch.look(row, now=NOW + 101) == {Key("backoff", "users/0")}
    row.paused = True
    watch.look(row, now=NOW + 102)
    assert watch.cleared == []


@pytest.mark.parametrize("service", ["kafka", "workers", "users"])
def test_a_service_that_stays_away_is_an_alert_at_the_limit(service):
    """Nothing is parked because a broker was down, but somebody should know (F2, S2)."""
    watch = Watch(retry=Backoff(alert_after="1m"))
    away = {service: "no answer"}
    assert watch.look(Row(), now=NOW, services=away) == set()
    assert watch.look(Row(), now=NOW + 60, services=away) == {Key("backoff", service)}
    assert watch.look(Row(), now=NOW + 61, went_well=True) == set()


def test_while_the_database_is_away_the_rest_stays_open():
    """What it last said still stands; only the outage itself can be new (S2)."""
    watch = Watch(retry=Backoff(alert_after="1m"))
    watch.look(Row(parked=3))
    away = {"database": "refused"}
    found = alerts.during_outage(watch.memory.outage(away, NOW), watch.limits, watch.open)
    assert found == watch.open
    found = alerts.during_outage(watch.memory.outage(away, NOW + 60), watch.limits, watch.open)
    assert set(found) == {Key("parked"), Key("backoff", "database")}
    again = alerts.during_outage(watch.memory.outage(away, NOW + 90), watch.limits, found)
    assert set(again) == set(found)


# Blocked


def test_a_blocked_partition_is_an_alert_at_once():
    """Block is loud: the first failure is told, and which event it is (F6, S2)."""
    watch = Watch(blocks=True)
    row = Row(partition=1, attempts=1, trouble="ValueError: no", stuck_at=100)
    assert watch.look(row) == {Key("blocked", "users/1")}
    text = watch.open[Key("blocked", "users/1")]
    assert text == "it stands on event users/1/100 (attempt 1): ValueError: no"
    row.paused = True
    assert watch.look(row) == {Key("blocked", "users/1")}
    assert watch.look(Row(partition=1)) == set()


def test_a_database_that_is_away_is_no_blocked_event():
    """With Block too, what hits every event is told at the limit (F2, F6)."""
    watch = Watch(blocks=True)
    assert watch.look(Row(attempts=1, trouble="OperationalError: away")) == set()


# Skipped


def skip(watch: Watch, consumed: int, skipped: int, now: float) -> bool:
    return Key("skipped") in watch.look(Row(consumed=consumed, skipped=skipped), now=now)


def test_loss_over_the_level_is_an_alert_and_ends_with_it():
    """By the counters, from one look to the next (F5, S2)."""
    watch = Watch(skipped_share=0.01)
    assert not skip(watch, 10_000, 9_000, NOW)
    assert not skip(watch, 12_000, 9_020, NOW + 1)
    assert skip(watch, 14_000, 9_100, NOW + 2)
    assert watch.open[Key("skipped")].startswith("100 of the last 4,000 events were skipped")
    for second in range(3, 63):
        skip(watch, 14_000 + 100 * second, 9_100, NOW + second)
    assert not skip(watch, 30_000, 9_100, NOW + 70)
    assert watch.raised == [Key("skipped")] == watch.cleared


def test_few_events_are_no_share():
    """The first event of a day is not a hundred percent; ten more than its level are enough."""
    watch = Watch(skipped_share=0.01)
    skip(watch, 0, 0, NOW)
    assert not skip(watch, 10, 10, NOW + 1)
    assert skip(watch, 11, 11, NOW + 2)


def test_loss_long_ago_is_forgotten_by_events_not_by_time():
    """A quiet night does not clear what the last thousand events say."""
    watch = Watch(skipped_share=0.01)
    skip(watch, 0, 0, NOW)
    assert skip(watch, 500, 100, NOW + 1)
    assert skip(watch, 500, 100, NOW + 40_000)
    assert skip(watch, 1_400, 100, NOW + 40_001)
    assert not skip(watch, 1_600, 100, NOW + 40_100)


def test_what_hovers_about_the_level_is_raised_once():
    """Cleared at half the level: no storm of hooks."""
    watch = Watch(skipped_share=0.01)
    consumed = skipped = 0
    for second in range(600):
        consumed += 1_000
        skipped += 11 if second % 60 < 30 else 9
        skip(watch, consumed, skipped, NOW + second)
    assert len(watch.raised) <= 1


def test_a_new_driver_does_not_clear_what_it_has_not_seen():
    """An open alarm lasts until a thousand events say otherwise (S2)."""
    watch = Watch(skipped_share=0.01)
    watch.open = {Key("skipped"): "as it was"}
    assert skip(watch, 5_000, 900, NOW)
    assert watch.open[Key("skipped")] == "as it was"
    assert not skip(watch, 6_000, 900, NOW + 5)


def test_counters_of_a_partition_that_was_given_up_do_not_confuse():
    """A topic that was made again takes its counters along."""
    watch = Watch(skipped_share=0.01)
    skip(watch, 50_000, 10, NOW)
    assert not skip(watch, 2_000, 5, NOW + 1)
    assert not skip(watch, 3_000, 6, NOW + 2)


def test_other_policies_have_no_alarm_level():
    """Skipped events of an older policy are not counted against this one."""
    watch = Watch()
    skip(watch, 0, 0, NOW)
    assert not skip(watch, 1_000, 1_000, NOW + 1)


# Lag


def test_lag_is_off_unless_it_is_set():
    """S2: nobody is woken for a backlog that nobody minds."""
    assert Watch().look(Row(), lags={"users/0": 10**9}) == set()


def test_lag_in_events_adds_up_and_eases():
    """Over the limit of all partitions together; cleared at half of it (S2, S4)."""
    watch = Watch(lag_events=100)
    rows = Row(), Row(partition=1)
    assert watch.look(*rows, lags={"users/0": 60, "users/1": 40}) == set()
    assert watch.look(*rows, lags={"users/0": 60, "users/1": 41}) == {Key("lag")}
    assert "the limit is 100 events" in watch.open[Key("lag")]
    assert watch.look(*rows, lags={"users/0": 90}, went_well=True) == {Key("lag")}
    assert watch.look(*rows, lags={"users/0": 50}, went_well=True) == set()


def test_lag_in_seconds_is_the_age_of_the_last_event_while_it_moves():
    """A backlog of yesterday is a day behind, however fast it is read (S4)."""
    watch = Watch(lag_seconds=300)
    watch.look(Row(next_offset=100), now=NOW, lags={"users/0": 500})
    moved = Row(next_offset=200, event_at=at(NOW - 86_400))
    assert watch.look(moved, now=NOW + 1, lags={"users/0": 400}) == {Key("lag")}
    assert "86,401 s behind" in watch.open[Key("lag")]
    there = Row(next_offset=600, event_at=at(NOW))
    assert watch.look(there, now=NOW + 2, lags={"users/0": 0}) == set()


def test_an_event_that_comes_after_a_quiet_hour_is_not_an_hour_old():
    """How old the last event is says nothing about one that came just now (S4)."""
    watch = Watch(lag_seconds=300)
    quiet = Row(event_at=at(NOW - 3_600))
    watch.look(quiet, now=NOW, lags={"users/0": 0})
    assert watch.look(quiet, now=NOW + 1, lags={"users/0": 1}) == set()
    assert watch.look(quiet, now=NOW + 300, lags={"users/0": 1}) == set()
    assert watch.look(quiet, now=NOW + 302, lags={"users/0": 1}) == {Key("lag")}


def test_an_event_from_the_future_is_no_negative_lag():
    """Producers' clocks differ."""
    watch = Watch(lag_seconds=0)
    watch.look(Row(next_offset=1), now=NOW, lags={"users/0": 5})
    row = Row(next_offset=2, event_at=at(NOW + 500))
    watch.look(row, now=NOW + 1, lags={"users/0": 4})
    assert watch.look(row, now=NOW + 2, lags={"users/0": 4}) == {Key("lag")}


def test_a_new_driver_keeps_an_open_lag_until_it_knows():
    """How old the next event is, it learns only from its first round."""
    watch = Watch(lag_seconds=300)
    watch.open = {Key("lag"): "as it was"}
    assert watch.look(Row(), lags={"users/0": 5}) == {Key("lag")}
    assert watch.look(Row(), lags={"users/0": 5}, went_well=True) == set()


# Crashes, and runs that ended


def test_workers_that_die_in_a_row_are_an_alert():
    """One may be an accident (S2)."""
    watch = Watch()
    assert watch.look(Row(), crashes=2, crash="exit code 139") == set()
    assert watch.look(Row(), crashes=3, crash="exit code 139") == {Key("crashes")}
    assert watch.open[Key("crashes")] == "3 rounds in a row ended in a crash: exit code 139"
    assert watch.look(Row(), crashes=0) == {Key("crashes")}
    assert watch.look(Row(), crashes=0, went_well=True) == set()


@pytest.mark.parametrize("kind", ["flood", "failed"])
def test_what_ended_a_run_is_over_when_the_next_one_passes_it(kind):
    """Neither a restart nor other partitions clear it (F12, S2)."""
    watch = Watch()
    watch.open = {Key(kind, "users/1"): "the run ended"}
    stands, moves = Row(partition=1, next_offset=42), Row(partition=2)
    assert watch.look(stands, moves) == {Key(kind, "users/1")}
    moves.next_offset = 1_000
    assert watch.look(stands, moves, went_well=True) == {Key(kind, "users/1")}
    stands.next_offset = 43
    assert watch.look(stands, moves, went_well=True) == set()


def test_what_ended_a_run_as_a_whole_is_over_after_a_round():
    """A setup that failed, events that were lost: the next round that comes to its end (S2)."""
    watch = Watch()
    watch.open = {Key("failed"): "the run ended"}
    assert watch.look(Row()) == {Key("failed")}
    assert watch.look(Row(), went_well=True) == set()


def test_a_partition_that_is_gone_is_not_waited_for():
    """Of a topic that was made again with fewer."""
    watch = Watch()
    watch.open = {Key("failed", "users/9"): "the run ended"}
    assert watch.look(Row()) == set()


# What it says


def test_no_password_and_no_page_of_text_in_an_alert():
    """A message goes to places that nobody here knows."""
    watch = Watch(retry=Backoff(alert_after=0))
    trouble = "cannot reach postgresql://zoey:hunter2@db/users\n\n" + "x" * 100_000
    watch.look(Row(attempts=1, trouble=trouble))
    text = watch.open[Key("backoff", "users/0")]
    assert "hunter2" not in text
    assert "\n" not in text
    assert len(text) < 2_000


def test_limits_are_what_the_pipeline_declares():
    """`Backoff(alert_after=)`, `Block()`, `Skip(alarm=)` and the settings count (S2)."""
    pipeline = Pipeline("p", topics="t", on_failure=Skip(alarm=0.2), retry=Backoff(alert_after=7))
    limits = Limits.of(pipeline, Alerting(lag_events=9))
    assert (limits.skipped_share, limits.retry.alert_after, limits.lag_events) == (0.2, 7, 9)
    assert not limits.blocks
    limits = Limits.of(Pipeline("p", topics="t", on_failure=Block()), Alerting())
    assert limits.blocks
    assert limits.skipped_share is None


KEYS = st.builds(Key, st.sampled_from(["parked", "backoff", "lag"]), st.sampled_from(["", "a/1"]))
ALERTS = st.dictionaries(KEYS, st.sampled_from(["one", "two"]))


@given(ALERTS, ALERTS)
def test_changes_lead_from_what_is_open_to_what_is_wanted(before, wanted):
    """Each alert is raised, worded anew, cleared or left alone, and nothing else."""
    raised, worded, cleared = alerts.compare(before, wanted)
    after = {key: text for key, text in before.items() if key not in cleared}
    assert not set(raised) & set(before)
    assert set(worded) <= set(before)
    assert after | worded | raised == wanted
    assert alerts.compare(wanted, wanted) == ({}, {}, [])


@given(
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 20),
    st.integers(0, 3_000),
    st.floats(0, 1e6),
)
def test_what_is_wanted_stays_wanted_while_nothing_changes(parked, crashes, skipped, lag, behind):
    """No alert comes and goes by itself."""
    limits = Limits(blocks=True, skipped_share=0.01, lag_events=1_000, lag_seconds=100)
    sight = Sight(
        parked=parked,
        loss=Loss(2_000, skipped),
        lag_events=lag,
        lag_seconds=behind,
        crashes=crashes,
    )
    first = alerts.wanted(sight, limits, NONE)
    assert set(alerts.wanted(sight, limits, first)) == set(first)
