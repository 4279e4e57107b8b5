"""Pointers into a source topic, and how long they are good for."""

import pytest

from sideline import Pipeline
from sideline.engine.lease import Partition
from sideline.errors import ConfigurationError, NotFoundError, RefusedError
from sideline.topics.plans import Found
from sideline.topics.stash import Pointer, check_stash, expiring, verdict

SPOT = Partition("users", 2)
DAY = 86_400.0


class Brokers:
    """What is asked of a cluster."""

    bootstrap = "broker-1.example:9092"

    def __init__(self, **topics):
        self._topics = topics

    def describe(self, name):
        settings = self._topics.get(name.replace(".", "_"))
        return None if settings is None else Found(name, 3, 1, settings)

    def beginnings(self, partitions):
        return dict.fromkeys(partitions, 0)


def test_a_pointer_that_retention_reaches_within_a_day_is_told():
    """A day before, at the latest; and afterwards that it is gone (S2)."""
    pointer = Pointer(SPOT, 5, 1_000_000, 3)
    made, week = 1_000.0, 7 * DAY
    assert verdict(pointer, 0, week, made + 5.9 * DAY) is None
    told = verdict(pointer, 0, week, made + 6.5 * DAY)
    assert "users/2/5" in told
    assert "in about 12 h" in told
    assert "3 events" in told
    assert "in about 0 h" in verdict(pointer, 5, week, made + 9 * DAY)
    assert "are gone" in verdict(pointer, 6, week, made)
    assert "is dead, and" in verdict(pointer._replace(state="dead"), 6, week, made)
    assert verdict(pointer, 5, None, made + 999 * DAY) is None
    assert verdict(pointer._replace(timestamp_ms=None), 5, week, made + 9 * DAY) is None


def test_what_is_kept_for_ever_does_not_expire():
    """Retention of -1 ends nothing."""
    pointer = Pointer(SPOT, 5, 1_000_000, 1)
    assert expiring(Brokers(users={"retention.ms": "-1"}), [pointer], 9e9) == {}
    assert list(expiring(Brokers(users={"retention.ms": "1"}), [pointer], 9e9)) == ["users/2"]
    assert expiring(Brokers(), [], 9e9) == {}


def test_what_points_into_a_topic_that_is_no_more_is_told():
    """The topic was deleted, or made again with fewer partitions: nobody asks Kafka for it (S2)."""
    pointer = Pointer(SPOT, 5, 1_000_000, 1)
    beyond = pointer._replace(partition=Partition("orders", 3))
    found = expiring(Brokers(orders={}), [pointer, beyond], 9e9)
    assert list(found) == ["users/2", "orders/3"]
    assert all("the source topic is not there any more" in told for told in found.values())


def test_pointers_into_a_compacted_topic_are_refused():
    """A later event of the key would take the parked one away."""
    pipeline = Pipeline("login", topics="users", stash="pointer")
    check_stash(pipeline, Brokers(users={"cleanup.policy": "delete"}))
    for policy in ("compact", "compact,delete"):
        with pytest.raises(RefusedError, match="is compacted"):
            check_stash(pipeline, Brokers(users={"cleanup.policy": policy}))


def test_a_stash_topic_has_to_be_there():
    """It is made by `sideline topics create`, never by a run."""
    pipeline = Pipeline("login", topics="users", stash="topic")
    with pytest.raises(NotFoundError, match=r"users\.login\.stash"):
        check_stash(pipeline, Brokers(users={}))
    check_stash(pipeline, Brokers(users={}, users_login_stash={}))
    with pytest.raises(ConfigurationError, match="stash"):
        Pipeline("login", topics="users", stash="nowhere")
