"""What a pipeline's own topics have to be like."""

import pytest

from sideline.topics.names import OwnTopic
from sideline.topics.plans import DAY_MS, MARGIN_MS, Found, Setting, differences, plan

SOURCE = Found("users", 6, 3, {"max.message.bytes": "2000000"})
RETRY = OwnTopic("users.login.retry.1", "retry", "users", 1)
DEAD = OwnTopic("users.login.dlq", "dead-letter", "users")
STASH = OwnTopic("users.login.stash", "stash", "users")
DELAYS = (10_000, 60_000, 600_000)


def of(topic, source=SOURCE, brokers=3):
    return plan(topic, source, delays_ms=DELAYS, brokers=brokers)


def values(wanted):
    return {setting.name: setting.value for setting in wanted.all}


def as_planned(wanted, **changed):
    settings = {setting.name: setting.value for setting in wanted.settings}
    settings |= {name.replace("_", "."): value for name, value in changed.items()}
    return Found(
        wanted.topic.name, int(wanted.partitions.value), int(wanted.replication.value), settings
    )


@pytest.mark.parametrize("topic", [RETRY, DEAD, STASH])
def test_every_topic_survives_a_broker(topic):
    """As many replicas as the source, one less in sync, no unclean leader (P3)."""
    wanted = values(of(topic))
    assert wanted["partitions"] == "6"
    assert wanted["replication.factor"] == "3"
    assert wanted["min.insync.replicas"] == "2"
    assert wanted["unclean.leader.election.enable"] == "false"
    assert wanted["message.timestamp.type"] == "LogAppendTime"
    assert int(wanted["max.message.bytes"]) >= 2_000_000 + 16 * 1024
    assert all(setting.why for setting in of(topic).all)


def test_a_source_with_few_replicas_is_no_example():
    """Copies get three replicas where there are brokers for them; one broker can have one (P3)."""
    weak = SOURCE._replace(replication=1)
    assert values(of(DEAD, weak, brokers=5))["replication.factor"] == "3"
    assert values(of(DEAD, weak, brokers=2))["min.insync.replicas"] == "1"
    alone = values(of(DEAD, weak, brokers=1))
    assert (alone["replication.factor"], alone["min.insync.replicas"]) == ("1", "1")


def test_retry_topics_outlive_the_longest_wait():
    """Retention is never shorter than the longest wait, and segments let it work (R7, F8)."""
    wanted = values(of(RETRY))
    assert int(wanted["retention.ms"]) == 600_000 + MARGIN_MS
    assert wanted["retention.bytes"] == "-1"
    assert wanted["cleanup.policy"] == "delete"
    assert int(wanted["segment.ms"]) <= int(wanted["retention.ms"]) // 2


@pytest.mark.parametrize("topic", [DEAD, STASH])
def test_what_is_kept_is_compacted(topic):
    """Dead letters and stashed events stay until a tombstone says otherwise (R7)."""
    wanted = values(of(topic))
    assert wanted["cleanup.policy"] == "compact"
    assert "retention.ms" not in wanted
    assert int(wanted["segment.ms"]) <= DAY_MS


def test_a_topic_as_planned_has_no_differences():
    """So has one that is better than planned."""
    for topic in (RETRY, DEAD, STASH):
        assert differences(of(topic), as_planned(of(topic))) == []
    more = as_planned(of(RETRY), retention_ms="-1", segment_ms="1000")._replace(partitions=12)
    assert differences(of(RETRY), more) == []
    wider = as_planned(of(DEAD), min_insync_replicas="4")._replace(replication=5)
    assert differences(of(DEAD), wider) == []


@pytest.mark.parametrize(
    ("topic", "name", "value"),
    [
        (RETRY, "retention.ms", "1000"),
        (RETRY, "retention.bytes", "1000"),
        (RETRY, "cleanup.policy", "compact"),
        (RETRY, "message.timestamp.type", "CreateTime"),
        (RETRY, "segment.ms", str(30 * DAY_MS)),
        (RETRY, "segment.ms", "-1"),
        (DEAD, "cleanup.policy", "delete"),
        (DEAD, "cleanup.policy", "compact,delete"),
        (DEAD, "min.insync.replicas", "1"),
        (DEAD, "min.insync.replicas", "3"),
        (DEAD, "max.message.bytes", "2000000"),
        (DEAD, "unclean.leader.election.enable", "true"),
        (STASH, "min.cleanable.dirty.ratio", "0.5"),
    ],
)
def test_what_is_wrong_is_found(topic, name, value):
    """Each difference says what is, what should be, and why (P3)."""
    (one,) = differences(of(topic), as_planned(of(topic), **{name.replace(".", "_"): value}))
    assert (one.topic, one.setting, one.is_) == (topic.name, name, value)
    assert one.alterable
    assert one.why


def test_replicas_and_partitions_of_kept_topics_are_not_altered():
    """Replicas need disks; in a compacted topic another partition would miss the tombstone."""
    few = as_planned(of(DEAD), min_insync_replicas="1")._replace(partitions=1, replication=2)
    assert [(one.setting, one.alterable) for one in differences(of(DEAD), few)] == [
        ("partitions", False),
        ("replication.factor", False),
    ]
    few = as_planned(of(RETRY))._replace(partitions=1)
    assert [(one.setting, one.alterable) for one in differences(of(RETRY), few)] == [
        ("partitions", True)
    ]


def test_a_missing_topic_differs_in_everything():
    """What is not there has to be made."""
    wanted = of(DEAD)
    assert len(differences(wanted, None)) == len(wanted.all)


def test_nonsense_is_a_difference():
    """A value that is no number is not taken for one."""
    assert not Setting("a", "1", "", at_least=True).fits("x")
    assert not Setting("a", "1", "", at_least=True).fits(None)
