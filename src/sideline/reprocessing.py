"""What `sideline reprocess` would do, and who stands in its way (R5, C6). Changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sideline import again, guardrail
from sideline.engine.lease import Partition
from sideline.engine.positions import resolve
from sideline.errors import NotFoundError, RefusedError, UsageError
from sideline.ledger import runs
from sideline.ledger.place import PartitionRow, describe_pipeline, is_held, partition_rows
from sideline.ledger.reading import schema_of
from sideline.ledger.runs import Range, RunRow, Wish
from sideline.ledger.sql import queries
from sideline.policies import Skip

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.pipeline import Pipeline, Start
    from sideline.topics.admin import Cluster

DAMAGED = ("dead", "discarded")
WAITING = ("parked", "retrying")


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a person asked for."""

    start: Start
    to: Start | None = None
    """None: as far as the pipeline has come."""
    include_damaged: bool = False
    repeat_effects: bool = False
    skip_failures: bool = False
    leave_old_states: bool = False
    reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What would be applied again."""

    pipeline: str
    ranges: Sequence[Range]
    left_out: Mapping[str, int]
    """Events that are not tried, by their state."""
    keys_aside: int
    guarded: bool
    """The pipeline may run meanwhile: an older event never replaces a newer row."""
    running: bool
    paused: bool
    declared: Sequence[str] | None
    """The effects that the pipeline declares; None: it declares none."""
    repeats: Sequence[str]
    shared: bool
    """Keys may live in several partitions: across them the order may be another one this time."""
    asked: Asked
    cut: bool
    """More was asked for than the pipeline itself has passed."""
    short: bool
    """It ends before what the pipeline has passed: later events of its keys are not repeated."""

    @property
    def ages(self) -> bool:
        """Whether rows stay in an old state, because order matters and the last events lack."""
        return self.short and not self.guarded

    @property
    def offsets(self) -> int:
        """How many offsets there are; some may be holes."""
        return sum(one.offsets for one in self.ranges)

    @property
    def wish(self) -> Wish:
        """The same as the ledger writes it down."""
        return Wish(
            self.ranges,
            self.guarded,
            self.asked.include_damaged,
            self.asked.repeat_effects,
            self.asked.skip_failures,
            self.asked.reason,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "pipeline": self.pipeline,
            "ranges": [
                {
                    "topic": one.partition.topic,
                    "partition": one.partition.number,
                    "from": one.first,
                    "to": one.beyond,
                    "offsets": one.offsets,
                }
                for one in self.ranges
            ],
            "offsets": self.offsets,
            "left_out": {
                "damaged": sum(self.left_out.get(state, 0) for state in DAMAGED)
                if not self.asked.include_damaged
                else 0,
                "waiting": sum(self.left_out.get(state, 0) for state in WAITING),
            },
            "keys_aside": self.keys_aside,
            "mode": "beside" if self.guarded else "alone",
            "running": self.running,
            "paused": self.paused,
            "effects": self.declared,
            "happens_again": self.repeats,
            "include_damaged": self.asked.include_damaged,
            "repeat_effects": self.asked.repeat_effects,
            "skip_failures": self.asked.skip_failures,
            "reason": self.asked.reason,
            "cut_at_progress": self.cut,
            "leaves_old_states": self.ages,
            "shared_keys": self.shared,
        }


def look(connection: Connection, cluster: Cluster, pipeline: Pipeline, asked: Asked) -> Plan:
    """Plan it, or say why it may not be."""
    row, parts = _known(connection, pipeline)
    if (run := runs.under_way(connection, pipeline.name)) is not None:
        raise runs.unfinished(run)
    if isinstance(pipeline.on_failure, Skip):
        asked = dataclasses.replace(asked, skip_failures=True)
    repeats = again.repeats(pipeline)
    if repeats and not asked.repeat_effects:
        raise _twice(pipeline.name, repeats)
    ranges, cut, short = _ranges(cluster, pipeline, parts, asked)
    guarded = guardrail.is_order_free(pipeline)
    if short and not guarded and not asked.leave_old_states:
        raise _aged(pipeline.name)
    running = is_held(connection, pipeline.name)
    paused = row["paused"] or all(part.paused for part in parts)
    if running and not paused and not guarded:
        raise runs.live(pipeline.name)
    left_out = _left_out(connection, pipeline.name, ranges)
    named = {"pipeline": pipeline.name}
    shared = {topic for (topic,) in connection.execute(queries()["shared_topics"], named)}
    connection.rollback()
    return Plan(
        pipeline.name,
        ranges,
        left_out,
        sum(part.aside for part in parts),
        guarded,
        running,
        paused,
        _names(pipeline),
        repeats,
        pipeline.key is not None or any(one.partition.topic in shared for one in ranges),
        asked,
        cut,
        short,
    )


def resumed(connection: Connection, pipeline: Pipeline) -> RunRow:
    """The run that is not over, if it may go on."""
    _known(connection, pipeline)
    run = runs.under_way(connection, pipeline.name)
    if run is None:
        message = f"no run of pipeline {pipeline.name!r} is under way."
        raise NotFoundError(message, hint="Begin one: --from earliest, a time, or 0:120,1:90.")
    if not run.alone and not guardrail.is_order_free(pipeline):
        message = (
            f"run {run.name} began beside the pipeline, whose upserts are no longer guarded by "
            "version."
        )
        hint = "Give them version= again, or give the run up with --cancel."
        raise RefusedError(message, hint=hint)
    connection.rollback()
    return run


def _known(connection: Connection, pipeline: Pipeline) -> tuple[dict[str, Any], list[PartitionRow]]:
    """The pipeline's rows, of the topics that it still reads."""
    row = describe_pipeline(connection, pipeline.name) if schema_of(connection) else None
    if row is None:
        message = f"pipeline {pipeline.name!r} has not run with this database: nothing to repeat."
        raise NotFoundError(message, hint="`sideline run` begins at the earliest event by itself.")
    parts = partition_rows(connection, pipeline.name)
    return row, [part for part in parts if part.topic in pipeline.topics]


def _ranges(
    cluster: Cluster, pipeline: Pipeline, parts: Sequence[PartitionRow], asked: Asked
) -> tuple[list[Range], bool, bool]:
    """Where each partition begins and ends: never beyond what the pipeline has passed.

    Also whether more than that was asked for, and whether some range ends before it.
    """
    found: list[Range] = []
    cut = short = False
    for topic in pipeline.topics:
        rows = {Partition(topic, part.partition): part for part in parts if part.topic == topic}
        info = cluster.topic(topic)
        if any(part.topic_id != info.id for part in rows.values()):
            message = f"topic {topic!r} was made again since pipeline {pipeline.name!r} read it."
            hint = "Its old events are gone. `sideline run` says what was lost."
            raise RefusedError(message, hint=hint)
        there = [partition for partition in rows if partition.number in info.partitions]
        starts = resolve(asked.start, there, cluster)
        ends = None if asked.to is None else _ends(asked.to, there, cluster)
        beginnings = cluster.beginnings(there)
        for partition in sorted(there):
            passed = rows[partition].next_offset
            first = min(max(starts[partition], beginnings[partition]), passed)
            if isinstance(asked.start, Mapping) and partition.number not in asked.start:
                # Whoever names offsets means these partitions and no others.
                first = passed
            wanted = passed if ends is None else ends[partition]
            cut = cut or wanted > passed
            short = short or first < wanted < passed
            found.append(Range(partition, first, max(first, min(wanted, passed))))
    return found, cut, short


def _ends(to: Start, partitions: list[Partition], cluster: Cluster) -> dict[Partition, int]:
    if to == "earliest":
        raise UsageError("--to earliest is before everything.", hint="Write a time, or 0:120,1:90.")
    # Partitions that offsets do not name end where they begin.
    return resolve(to, partitions, cluster)


def _left_out(connection: Connection, pipeline: str, ranges: Sequence[Range]) -> dict[str, int]:
    named = {
        "pipeline": pipeline,
        "topics": [one.partition.topic for one in ranges],
        "partitions": [one.partition.number for one in ranges],
        "starts": [one.first for one in ranges],
        "ends": [one.beyond for one in ranges],
    }
    return dict(connection.execute(queries()["registry_counts"], named).fetchall())


def _names(pipeline: Pipeline) -> list[str] | None:
    if pipeline.effects is None:
        return None
    kinds = (one if isinstance(one, type) else type(one) for one in pipeline.effects)
    return sorted({kind.__name__ for kind in kinds})


def _twice(pipeline: str, repeats: Sequence[str]) -> RefusedError:
    message = f"pipeline {pipeline!r} has effects that would happen again: {', '.join(repeats)}."
    hint = (
        "Say --repeat-effects if that is what you want: rows are inserted twice, calls made twice."
    )
    return RefusedError(message, hint=hint)


def _aged(pipeline: str) -> RefusedError:
    message = (
        f"the range ends before what pipeline {pipeline!r} has passed: rows whose keys had later "
        "events would stay in an old state for good."
    )
    hint = (
        "Leave --to out, or guard its upserts by version.\n"
        "If old states are what you want, say --leave-old-states."
    )
    return RefusedError(message, hint=hint)


def moment(value: object) -> str:
    """A start or an end as people wrote it."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return ",".join(f"{number}:{offset}" for number, offset in value.items())
    return str(value)
