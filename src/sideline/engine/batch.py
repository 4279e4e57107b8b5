"""What a batch of a Structured Streaming query is made of, and whether it may be applied.

Which task reads which offsets stands in the lineage of the batch's rows, before any of them is
read. So whatever would break the order is refused before anything is written.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import orjson

from sideline.engine.feed import COLUMNS, HEADERS
from sideline.engine.feeding import further
from sideline.engine.lease import Partition
from sideline.errors import RefusedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sideline.dedupe import MessageId

# What Kafka's source makes of a record. Whatever a query adds stands beside it.
TYPES = {
    "topic": {"string"},
    "partition": {"int", "bigint"},
    "offset": {"bigint"},
    "timestamp": {"timestamp"},
    "key": {"binary"},
    "value": {"binary"},
}
HEADERS_TYPE = "array<struct<key:string,value:binary>>"
QUERY_ID = "sql.streaming.queryId"
SOURCE = "StreamingDataSourceV2ScanRelation"
# Joins that find an event's matches, and do not make a row of each.
SINGLE_JOINS = ("LeftSemi", "LeftAnti", "ExistenceJoin", "LeftSingle")
# Options of the source that would divide a partition, or hide a loss, and why not.
OPTIONS = {
    "minpartitions": "divides a partition of Kafka among several tasks",
    "maxrecordsperpartition": "divides a partition of Kafka among several tasks",
}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Offsets of a partition that one task reads."""

    partition: Partition
    start: int
    until: int


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What a batch brings."""

    tasks: tuple[tuple[Range, ...], ...]
    """By the number of the Spark partition."""
    starts: Mapping[Partition, int]
    """Where the query stands in every partition that it reads, also in those without an event."""
    ends: Mapping[Partition, int]
    may_multiply: bool = False
    """Whether an event may have several rows, as far as the plan says."""

    @property
    def mixed(self) -> bool:
        """Whether a task reads several partitions: then its rows have to name theirs."""
        return any(len(task) > 1 for task in self.tasks)


class Query:
    """The running query that a batch belongs to."""

    def __init__(self, name: str, execution: Any) -> None:  # noqa: ANN401 - the JVM's
        self.id = name
        self._execution = execution

    @classmethod
    def of(cls, frame: DataFrame) -> Query:
        """The query whose batch it is."""
        session = _java_session(frame)
        context = frame.sparkSession.sparkContext
        name = context.getLocalProperty(QUERY_ID)
        execution = None
        if name:
            key = context._jvm.java.util.UUID.fromString(name)  # type: ignore[union-attr] # noqa: SLF001
            execution = session.sharedState().activeStreamingQueries().get(key)
        if execution is None:
            _refuse(
                "foreach_batch was called outside of a streaming query.",
                "Use it as spark.readStream ... .writeStream.foreachBatch(users.foreach_batch).",
            )
        return cls(name or "", execution)

    @property
    def is_active(self) -> bool:
        """Whether it still runs, as far as this process can see."""
        try:
            return bool(self._execution.isActive())
        # Spark's JVM has ended, and the query with it; py4j says so in many ways.
        except Exception as error:  # noqa: BLE001
            log.debug("the query is gone: %s", error)
            return False

    def same(self, other: Query) -> bool:
        """Whether it is the very run of the query."""
        return bool(self._execution.equals(other._execution))

    def check(self, frame: DataFrame) -> None:
        """Refuse ways to run a query in which a batch, or an event, is not what it seems."""
        kind = _name(self._execution)
        if "AsyncProgress" in kind:
            _refuse(
                "the query tracks its progress asynchronously.",
                "Drop the option asyncProgressTrackingEnabled.",
            )
        trigger = _name(self._execution.trigger())
        if "RealTime" in trigger or "Continuous" in trigger:
            _refuse(
                "the query runs in real-time or continuous mode, which has no batches.",
                "Use a trigger of processingTime or availableNow.",
            )
        for relation in self._relations():
            _check_options(relation.relation().options())
        _check_origin(frame._jdf.queryExecution().analyzed(), _origins(self._plan(), {}))  # noqa: SLF001

    def may_multiply(self, frame: DataFrame) -> bool:
        """Whether only the rows can tell that each event is one of them."""
        plans = (self._plan(), frame._jdf.queryExecution().analyzed())  # noqa: SLF001
        return any(_multiplies(name, node) for plan in plans for name, node in _named(plan))

    def positions(self) -> tuple[dict[Partition, int], dict[Partition, int]]:
        """Where the batch starts and ends in every partition that the query reads."""
        starts: dict[Partition, int] = {}
        ends: dict[Partition, int] = {}
        for relation in self._relations():
            if not _name(relation.stream()).endswith("KafkaMicroBatchStream"):
                _refuse("the query reads a source that is not Kafka.", _ONLY_KAFKA)
            if relation.startOffset().isDefined():
                starts |= _offsets(relation.startOffset().get())
            if relation.endOffset().isDefined():
                ends |= _offsets(relation.endOffset().get())
        return starts, ends

    def _relations(self) -> Iterator[Any]:
        nodes = _named(self._plan())
        _check_rows(name for name, _ in nodes)
        return (node for name, node in nodes if name.endswith(SOURCE))

    def _plan(self) -> Any:  # noqa: ANN401 - the JVM's
        return self._execution.lastExecution().logical()


_ONLY_KAFKA = "Join or unite what is static by broadcast; only the events themselves may stream."


def look(frame: DataFrame, query: Query) -> Batch:
    """What a batch brings; refused with the reason if it may not be applied."""
    check_columns(frame)
    starts, ends = query.positions()
    plan = frame._jdf.queryExecution()  # noqa: SLF001 - the JVM's side has no public name
    _check_rows(name for name, _ in _named(plan.analyzed()))
    tasks = tuple(map(tuple, _tasks(plan.toRdd())))
    seen: set[Partition] = set()
    for one in (one for task in tasks for one in task):
        if one.partition in seen:
            _refuse(
                f"several tasks of the query read {one.partition}.",
                "Read it once, without minPartitions and maxRecordsPerPartition.",
            )
        seen.add(one.partition)
        # As the plan says it; should it not, as the tasks do.
        starts.setdefault(one.partition, one.start)
        ends.setdefault(one.partition, one.until)
    return Batch(tasks, starts, ends, query.may_multiply(frame))


def check_columns(frame: DataFrame) -> None:
    """Refuse rows of which no event can be made."""
    names = frame.columns
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        _refuse(
            f"the query has no column {', '.join(missing)}.",
            f"Keep {', '.join(COLUMNS)} as Kafka's source makes them, and add columns beside them.",
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        _refuse(
            f"the query has several columns {', '.join(twice)}.",
            "Give columns of a joined table other names, or drop them.",
        )
    kinds = dict(frame.dtypes)
    for name, wanted in TYPES.items():
        if kinds[name] not in wanted:
            _refuse(
                f"the query's column {name} is {kinds[name]}, not {' or '.join(sorted(wanted))}.",
                "Keep it as Kafka's source makes it: a parked event keeps its exact bytes.\n"
                "Put what is parsed into another column; the handler finds it in event.row.",
            )
    if HEADERS in names and kinds[HEADERS] != HEADERS_TYPE:
        _refuse(f"the query's column {HEADERS} is {kinds[HEADERS]}, not {HEADERS_TYPE}.")
    strange = [name for name in further(frame) if kinds[name] in {"variant", "void"}]
    if strange:
        _refuse(
            f"the query's column {strange[0]} is {kinds[strange[0]]}, which Arrow cannot carry.",
            "Cast it, or drop it.",
        )


def check_ids(dedupe: MessageId | None, frame: DataFrame) -> None:
    """Refuse a duplicate check that would find no id in any event (C4)."""
    if dedupe is not None and dedupe.of is None and HEADERS not in frame.columns:
        _refuse(
            f"dedupe= looks at header {dedupe.header!r}, and the query brings no headers.",
            'Set the source\'s option includeHeaders to "true", and keep the column headers.',
        )


def _tasks(rdd: Any) -> list[list[Range]]:  # noqa: ANN401 - the JVM's
    """What each partition of an RDD reads, through everything that happens to the rows."""
    dependencies = _items(rdd.dependencies())
    if not dependencies:
        return _source(rdd)
    tasks: list[list[Range]] = [[] for _ in range(rdd.getNumPartitions())]
    for dependency in dependencies:
        kind = _name(dependency)
        if kind.endswith("ShuffleDependency"):
            _refuse(
                "the query shuffles events before the sink (repartition, groupBy, a join that is\n"
                "no broadcast, dropDuplicates, orderBy), so that they lose their order.",
                "Take it out, or join with broadcast(table).",
            )
        parents = _tasks(dependency.rdd())
        for number, task in enumerate(tasks):
            if kind.endswith("OneToOneDependency"):
                task.extend(parents[number])
            else:
                for parent in _items(dependency.getParents(number)):
                    task.extend(parents[parent])
    return tasks


def _source(rdd: Any) -> list[list[Range]]:  # noqa: ANN401 - the JVM's
    """What the tasks of Kafka's source read."""
    tasks = []
    for part in rdd.partitions():
        chosen = part.inputPartition() if "DataSourceRDDPartition" in _name(part) else None
        if chosen is None or not chosen.isDefined():
            _refuse("the batch has rows that do not come from Kafka.", _ONLY_KAFKA)
        given = chosen.get()
        if not _name(given).endswith("KafkaBatchInputPartition"):
            _refuse("the batch has rows that do not come from Kafka.", _ONLY_KAFKA)
        offsets = given.offsetRange()
        spot = offsets.topicPartition()
        partition = Partition(spot.topic(), spot.partition())
        tasks.append([Range(partition, offsets.fromOffset(), offsets.untilOffset())])
    return tasks


def _check_options(options: Any) -> None:  # noqa: ANN401 - a Java map
    for name, why in OPTIONS.items():
        if options.get(name) is not None:
            _refuse(
                f"the query's option {name} {why}, so that its events lose their order.",
                "Drop it: a partition is one task's.",
            )
    if (options.get("failOnDataLoss") or "true").lower() == "false":
        _refuse(
            "the query's option failOnDataLoss=false passes over lost events in silence.",
            "Drop it: a loss is said, with its range, and a person accepts it.",
        )


def _check_rows(names: Iterable[str]) -> None:
    """Refuse a plan with such nodes."""
    kinds = list(names)
    if any(kind.endswith(("logical.Generate", "logical.Expand")) for kind in kinds):
        _refuse(
            "the query makes several rows of an event (explode, unpivot, or alike).",
            "An event is one row: take it apart in the handler.",
        )
    if any(kind.endswith("logical.Sort") for kind in kinds):
        _refuse(
            "the query sorts its rows (sortWithinPartitions, orderBy), so that events come in\n"
            "another order than Kafka's.",
            "Take the sorting out: the rows of a partition come in the order of its log.",
        )


def _check_origin(plan: Any, known: Mapping[int, str]) -> None:  # noqa: ANN401 - the JVM's
    """Refuse columns of a record that are not Kafka's own any more (F13)."""
    origins = _origins(plan, known)
    for attribute in _items(plan.output()):
        name = attribute.name()
        if (name in COLUMNS or name == HEADERS) and origins.get(attribute.exprId().id()) != name:
            _refuse(
                f"the query's column {name} is made by the query, not by Kafka's source.",
                "Keep it as Kafka's source makes it: a parked event keeps its exact bytes.\n"
                "Put what is made of it into another column; the handler finds it in event.row.",
            )


def _origins(plan: Any, known: Mapping[int, str]) -> dict[int, str]:  # noqa: ANN401 - the JVM's
    """Which attributes of a plan are columns of Kafka's source, and which ones.

    ``known``: those of the query that a batch's own plan begins with.
    """
    kind = _name(plan)
    output = _items(plan.output())
    if kind.endswith(SOURCE):
        return {one.exprId().id(): one.name() for one in output}
    children = _items(plan.children())
    if not children:
        return dict(known)
    found = [_origins(child, known) for child in children]
    if kind.endswith("logical.Union"):
        # Its output has the names of the first one, whatever stands there in the others.
        rows = [
            [each.get(one.exprId().id()) for one in _items(child.output())]
            for child, each in zip(children, found, strict=True)
        ]
        return {
            one.exprId().id(): names[0]
            for one, *names in zip(output, *rows, strict=True)
            if names[0] is not None and len(set(names)) == 1
        }
    origins = {number: name for each in found for number, name in each.items()}
    if kind.endswith("logical.Project"):
        origins |= _renamed(_items(plan.projectList()), origins)
    return origins


def _renamed(expressions: list[Any], origins: Mapping[int, str]) -> dict[int, str]:
    """Other names for the same columns."""
    found = {}
    for one in expressions:
        child = _items(one.children())[0] if _name(one).endswith("expressions.Alias") else None
        if child is not None and _name(child).endswith("AttributeReference"):
            name = origins.get(child.exprId().id())
            if name is not None:
                found[one.exprId().id()] = name
    return found


def _multiplies(kind: str, node: Any) -> bool:  # noqa: ANN401 - the JVM's
    if not kind.endswith("Join"):
        return False
    return not (
        kind.endswith("logical.Join") and str(node.joinType().toString()).startswith(SINGLE_JOINS)
    )


def _offsets(offset: Any) -> dict[Partition, int]:  # noqa: ANN401 - the JVM's
    found: dict[str, dict[str, int]] = orjson.loads(offset.json())
    return {
        Partition(topic, int(number)): at
        for topic, numbers in found.items()
        for number, at in numbers.items()
    }


def _named(plan: Any) -> list[tuple[str, Any]]:  # noqa: ANN401 - the JVM's
    """All nodes of a plan with the names of their classes: each costs calls into the JVM."""
    below = [pair for child in _items(plan.children()) for pair in _named(child)]
    return [(_name(plan), plan), *below]


def _items(sequence: Any) -> list[Any]:  # noqa: ANN401 - a Scala collection
    return [sequence.apply(place) for place in range(sequence.size())]


def _name(thing: Any) -> str:  # noqa: ANN401 - the JVM's
    return str(thing.getClass().getName()).rstrip("$")


def _java_session(frame: DataFrame) -> Any:  # noqa: ANN401 - the JVM's
    if getattr(frame, "_jdf", None) is None:
        _refuse(
            "this is a Spark Connect session: foreach_batch needs the driver's own process.",
            "Use a classic session, or `sideline run`.",
        )
    return frame._jdf.sparkSession()  # noqa: SLF001


def _refuse(message: str, hint: str | None = None) -> NoReturn:
    raise RefusedError(message, hint=hint)
