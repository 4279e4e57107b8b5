"""What a pipeline's own topics have to be like, and what is wrong with those that are there (pure).

Every setting comes with its reason, for whoever has to ask for it elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sideline.topics.headers import ROOM_BYTES
from sideline.topics.names import OwnTopic

DAY_MS = 86_400_000
# A copy outlives its wait by this, so that a pipeline may stand still for a while.
MARGIN_MS = 7 * DAY_MS
# Segments are closed this often, or as often as retention can make use of it.
SEGMENT_MS = DAY_MS
# What was purged is gone from the disks after this, however little there is to clean.
PURGED_WITHIN_MS = 7 * DAY_MS
# Keys are in the headers of copies too.
MESSAGE_ROOM_BYTES = 4 * ROOM_BYTES
ENOUGH_REPLICAS = 3

PARTITIONS = "partitions"
REPLICATION = "replication.factor"


class Found(NamedTuple):
    """A topic as the broker describes it."""

    name: str
    partitions: int
    replication: int
    """The fewest replicas that one of its partitions has."""
    settings: Mapping[str, str]


class Setting(NamedTuple):
    """One thing that a topic has to be like."""

    name: str
    value: str
    why: str
    at_least: bool = False
    """More is right as well; -1 is the most."""
    at_most: bool = False
    """Less is right as well."""

    def fits(self, value: str | None) -> bool:
        """Whether a topic that has this value is as it should be."""
        if value is None or not (self.at_least or self.at_most):
            return value == self.value
        is_, wanted = _number(value), _number(self.value)
        if is_ is None or wanted is None:
            return False
        return _endless(is_) >= _endless(wanted) if self.at_least else 0 <= is_ <= wanted


class Plan(NamedTuple):
    """A topic of the pipeline's own, with everything that it has to be like."""

    topic: OwnTopic
    partitions: Setting
    replication: Setting
    settings: tuple[Setting, ...]

    @property
    def all(self) -> tuple[Setting, ...]:
        """Every setting, as a list shows it."""
        return (self.partitions, self.replication, *self.settings)


class Difference(NamedTuple):
    """What is not as it should be."""

    topic: str
    setting: str
    is_: str | None
    """None: the topic is missing, or has no such setting."""
    should: str
    why: str
    alterable: bool
    """Whether `sideline topics create --alter` can mend it."""


def plan(topic: OwnTopic, source: Found, *, delays_ms: Sequence[int], brokers: int) -> Plan:
    """What a topic of the pipeline's own has to be like, beside its source."""
    replicas = max(source.replication, min(ENOUGH_REPLICAS, brokers))
    return Plan(
        topic,
        Setting(
            PARTITIONS,
            str(source.partitions),
            f"as {source.name}: as many are written and read side by side",
            at_least=True,
        ),
        Setting(
            REPLICATION,
            str(replicas),
            "a broker may be lost without losing a copy"
            if replicas > 1
            else "the cluster has one broker: losing it loses the copies",
            at_least=True,
        ),
        (
            in_sync(replicas),
            Setting(
                "unclean.leader.election.enable",
                "false",
                "a leader that lacks acknowledged copies would lose them",
            ),
            Setting(
                "message.timestamp.type",
                "LogAppendTime",
                "waiting times are counted by the broker's clock, which only grows"
                if topic.kind == "retry"
                else "no copy is refused for its event's time, which is in its headers",
            ),
            *(_retry(delays_ms) if topic.kind == "retry" else _kept()),
            Setting(
                "max.message.bytes",
                str(_largest(source) + MESSAGE_ROOM_BYTES),
                f"as {source.name}, and room for the headers of a copy",
                at_least=True,
            ),
        ),
    )


def in_sync(replicas: int) -> Setting:
    """How many replicas have to have a copy before it counts as written."""
    return Setting(
        "min.insync.replicas",
        str(max(1, replicas - 1)),
        "one less than the replicas: what is acknowledged survives a broker, and one that is away "
        "stops nobody"
        if replicas > 1
        else "there is one replica",
    )


def _retry(delays_ms: Sequence[int]) -> tuple[Setting, ...]:
    retention = max(delays_ms, default=0) + MARGIN_MS
    return (
        Setting("cleanup.policy", "delete", "copies of one key must not replace each other"),
        Setting(
            "retention.ms",
            str(retention),
            f"the longest wait ({_span(max(delays_ms, default=0))}) and a week in which the "
            "pipeline may stand still",
            at_least=True,
        ),
        Setting("retention.bytes", "-1", "by size, copies that wait would be deleted"),
        Setting(
            "segment.ms",
            str(min(SEGMENT_MS, retention // 2)),
            "only closed segments are deleted",
            at_most=True,
        ),
    )


def _kept() -> tuple[Setting, ...]:
    return (
        Setting(
            "cleanup.policy",
            "compact",
            "kept until the incident is closed, then emptied by tombstones; keys are ids of "
            "events, so nothing that is open is removed",
        ),
        Setting(
            "min.cleanable.dirty.ratio",
            "0.1",
            "a tenth is enough to clean: what was purged goes soon",
            at_most=True,
        ),
        Setting(
            "max.compaction.lag.ms",
            str(PURGED_WITHIN_MS),
            "what was purged is gone after a week at the latest",
            at_most=True,
        ),
        Setting(
            "delete.retention.ms",
            str(DAY_MS),
            "readers have a day to see that a record was purged",
            at_least=True,
        ),
        Setting("segment.ms", str(SEGMENT_MS), "only closed segments are cleaned", at_most=True),
    )


def differences(wanted: Plan, found: Found | None) -> list[Difference]:
    """What is wrong with a topic; everything, if it is not there."""
    name = wanted.topic.name
    if found is None:
        return [
            Difference(name, setting.name, None, setting.value, setting.why, alterable=True)
            for setting in wanted.all
        ]
    settings = [
        # Of the replicas that it has.
        in_sync(found.replication) if setting.name == "min.insync.replicas" else setting
        for setting in wanted.settings
    ]
    has = {
        **found.settings,
        PARTITIONS: str(found.partitions),
        REPLICATION: str(found.replication),
    }
    return [
        Difference(
            name,
            setting.name,
            has.get(setting.name),
            setting.value,
            setting.why,
            # Replicas are moved by whoever knows the cluster's disks. In a compacted topic a
            # key's partition must stay what it is, or its tombstone would miss it.
            alterable=setting.name != REPLICATION
            and not (setting.name == PARTITIONS and wanted.topic.kind != "retry"),
        )
        for setting in (wanted.partitions, wanted.replication, *settings)
        if not setting.fits(has.get(setting.name))
    ]


def _largest(source: Found) -> int:
    return int(_number(source.settings.get("max.message.bytes", "")) or 1_048_588)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _endless(number: float) -> float:
    return float("inf") if number < 0 else number


def _span(milliseconds: int) -> str:
    for unit, size in (("d", DAY_MS), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if milliseconds >= size and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"
