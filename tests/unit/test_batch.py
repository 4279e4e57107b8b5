"""What a batch of a query is made of, as far as it can be judged without Spark (C1)."""

from __future__ import annotations

from typing import Any

import pytest

from sideline import MessageId
from sideline.engine import batch
from sideline.engine.batch import Query, Range
from sideline.engine.lease import Partition
from sideline.errors import RefusedError

KAFKA = [
    ("key", "binary"),
    ("value", "binary"),
    ("topic", "string"),
    ("partition", "int"),
    ("offset", "bigint"),
    ("timestamp", "timestamp"),
    ("timestampType", "int"),
]


class Frame:
    """Columns, and nothing else."""

    def __init__(self, *dtypes: tuple[str, str]) -> None:
        self.dtypes = list(dtypes)
        self.columns = [name for name, _ in dtypes]


class Java:
    """An object of the JVM: a class name, and what its methods return."""

    def __init__(self, kind: str, **methods: Any) -> None:
        self._kind = kind
        for name, result in methods.items():
            setattr(self, name, result if callable(result) else lambda result=result: result)

    def getClass(self) -> Java:  # noqa: N802 - Java's
        return Java("java.lang.Class", getName=self._kind)


class Seq(list):
    """A Scala collection."""

    def size(self) -> int:
        return len(self)

    def apply(self, place: int) -> Any:
        return self[place]


def source(*ranges: tuple[str, int, int, int]) -> Java:
    """Kafka's source, with a task for each range."""
    parts = [
        Java(
            "org.apache.spark.sql.execution.datasources.v2.DataSourceRDDPartition",
            inputPartition=Java(
                "scala.Some",
                isDefined=True,
                get=Java(
                    "org.apache.spark.sql.kafka010.KafkaBatchInputPartition",
                    offsetRange=Java(
                        "KafkaOffsetRange",
                        topicPartition=Java("TopicPartition", topic=topic, partition=number),
                        fromOffset=start,
                        untilOffset=until,
                    ),
                ),
            ),
        )
        for topic, number, start, until in ranges
    ]
    return Java("DataSourceRDD", dependencies=Seq(), partitions=parts)


def behind(parent: Java, kind: str, count: int, parents=None) -> Java:
    """An RDD that stands on another one."""
    dependency = Java(kind, rdd=parent, getParents=lambda number: Seq(parents[number]))
    return Java("RDD", dependencies=Seq([dependency]), getNumPartitions=count)


def test_rows_as_kafka_makes_them_are_welcome():
    """Also with headers, and with columns of the query's own."""
    batch.check_columns(Frame(*KAFKA))
    more = [("headers", batch.HEADERS_TYPE), ("person", "struct<name:string>")]
    batch.check_columns(Frame(*KAFKA, *more))


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        (KAFKA[2:], "no column key, value"),
        ([*KAFKA, ("offset", "bigint")], "several columns offset"),
        ([("value", "string"), *(one for one in KAFKA if one[0] != "value")], "value is string"),
        ([*KAFKA, ("headers", "string")], "headers is string"),
        ([*KAFKA, ("more", "variant")], "more is variant"),
    ],
    ids=["missing", "twice", "parsed in place", "headers", "no Arrow"],
)
def test_rows_of_which_no_event_can_be_made_are_refused(dtypes, reason):
    """A parked event keeps its exact bytes, and every row has its place (F13)."""
    with pytest.raises(RefusedError, match=reason):
        batch.check_columns(Frame(*dtypes))


def test_ids_in_headers_need_headers():
    """A duplicate check that finds no id is no check (C4); what a function reads nobody sees."""
    with pytest.raises(RefusedError, match="looks at header 'message-id'"):
        batch.check_ids(MessageId(), Frame(*KAFKA))
    batch.check_ids(MessageId(), Frame(*KAFKA, ("headers", batch.HEADERS_TYPE)))
    batch.check_ids(MessageId(of=lambda event: event.key), Frame(*KAFKA))
    batch.check_ids(None, Frame(*KAFKA))


def attribute(name: str, number: int, kind: str = "AttributeReference", *children: Java) -> Java:
    """A column of a plan."""
    of = f"org.apache.spark.sql.catalyst.expressions.{kind}"
    return Java(of, name=name, exprId=Java("ExprId", id=number), children=Seq(children))


def node(kind: str, output: list[Java], *children: Java, **more: Any) -> Java:
    """A step of a plan."""
    return Java(f"org.apache.spark.sql.{kind}", output=Seq(output), children=Seq(children), **more)


OFFSET, VALUE = attribute("offset", 1), attribute("value", 2)
SOURCE = node(f"execution.datasources.v2.{batch.SOURCE}", [OFFSET, VALUE])


def project(parent: Java, *columns: Java) -> Java:
    return node("catalyst.plans.logical.Project", list(columns), parent, projectList=Seq(columns))


def union(*parents: Java) -> Java:
    return node("catalyst.plans.logical.Union", list(parents[0].output()), *parents)


DECRYPTED = attribute("value", 7, "Alias", attribute("", 0, "AesDecrypt", VALUE))
COUNTED = attribute("offset", 7, "Alias", attribute("", 0, "Add"))
RENAMED = project(SOURCE, OFFSET, attribute("v", 8, "Alias", VALUE))
BACK = project(RENAMED, OFFSET, attribute("value", 9, "Alias", attribute("v", 8)))


@pytest.mark.parametrize(
    ("plan", "changed"),
    [
        (SOURCE, None),
        (node("catalyst.plans.logical.Filter", [OFFSET, VALUE], SOURCE), None),
        (BACK, None),
        (union(SOURCE, BACK), None),
        (project(SOURCE, OFFSET, DECRYPTED), "value"),
        (project(SOURCE, COUNTED, VALUE), "offset"),
        (project(SOURCE, OFFSET, attribute("value", 8, "Alias", OFFSET)), "value"),
        (union(SOURCE, project(SOURCE, OFFSET, DECRYPTED)), "value"),
        (node("catalyst.plans.logical.MapInArrow", [OFFSET, attribute("value", 9)], SOURCE),
         "value"),
    ],
    ids=["plain", "filter", "renamed", "union", "decrypted", "offset", "other", "half", "Python"],
)  # fmt: skip
def test_columns_of_the_record_are_kafkas_own(plan, changed):
    """Bytes that a query made are not parked as the record's, nor counted as its offset (F13)."""
    rows = node("execution.LogicalRDD", list(plan.output()))
    if changed is None:
        batch._check_origin(rows, batch._origins(plan, {}))
        return
    with pytest.raises(RefusedError, match=f"column {changed} is made by the query"):
        batch._check_origin(rows, batch._origins(plan, {}))


def test_a_batch_that_is_changed_on_its_way_is_seen_too():
    """A function around foreach_batch is no way around it (F13)."""
    rows = node("execution.LogicalRDD", [OFFSET, VALUE])
    known = batch._origins(SOURCE, {})
    batch._check_origin(project(rows, OFFSET, VALUE), known)
    with pytest.raises(RefusedError, match="column value is made by the query"):
        batch._check_origin(project(rows, OFFSET, DECRYPTED), known)


@pytest.mark.parametrize(
    ("kind", "join", "expected"),
    [
        ("catalyst.plans.logical.Join", "LeftOuter", True),
        ("catalyst.plans.logical.Join", "LeftSemi", False),
        ("catalyst.plans.logical.AsOfJoin", "Inner", True),
        ("catalyst.plans.logical.Project", "", False),
    ],
)
def test_a_join_may_make_several_rows_of_an_event(kind, join, expected):
    """Then the rows are looked at before any of them is applied (C3)."""
    plan = node(kind, [], SOURCE, joinType=Java("JoinType", toString=join))
    found = [batch._multiplies(name, each) for name, each in batch._named(plan)]
    assert any(found) is expected


def query(kind: str = "MicroBatchExecution", trigger: str = "ProcessingTimeTrigger") -> Query:
    """A query over Kafka, run in some way."""
    relation = node(
        f"execution.datasources.v2.{batch.SOURCE}",
        [OFFSET, VALUE],
        relation=Java("DataSourceV2Relation", options=dict),
    )
    plan = Java("IncrementalExecution", logical=relation)
    return Query("id", Java(kind, trigger=Java(trigger), lastExecution=plan))


def test_ways_to_run_a_query_without_real_batches_are_refused():
    """Asynchronous progress, real-time and continuous mode: a batch is not what it seems (C3)."""
    rows = Java("Dataset", queryExecution=Java("QueryExecution", analyzed=SOURCE))
    frame = Frame(*KAFKA)
    frame._jdf = rows
    query().check(frame)
    query(trigger="AvailableNowTrigger$").check(frame)
    with pytest.raises(RefusedError, match="asynchronously"):
        query("AsyncProgressTrackingMicroBatchExecution").check(frame)
    for trigger in ("RealTimeTrigger", "ContinuousTrigger"):
        with pytest.raises(RefusedError, match="has no batches"):
            query(trigger=trigger).check(frame)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"minpartitions": "8"}, "divides a partition"),
        ({"maxrecordsperpartition": "8"}, "divides a partition"),
        ({"failOnDataLoss": "False"}, "lost events in silence"),
    ],
    ids=["minPartitions", "maxRecordsPerPartition", "failOnDataLoss"],
)
def test_options_that_lose_order_or_events_are_refused(options, reason):
    """Before they have an effect: the next batch may be larger."""
    with pytest.raises(RefusedError, match=reason):
        batch._check_options(options)
    batch._check_options({"failOnDataLoss": "true", "subscribe": "users"})


def test_tasks_are_known_through_what_happens_to_the_rows():
    """Steps one after the other, and several partitions in one task (K4)."""
    kafka = source(("users", 0, 5, 10), ("users", 1, 0, 7), ("orders", 0, 1, 2))
    mapped = behind(kafka, "org.apache.spark.OneToOneDependency", 3)
    coalesced = behind(mapped, "CoalescedRDD$$anon$1", 2, parents=[[0, 2], [1]])
    users, others = Partition("users", 0), Partition("users", 1)
    assert batch._tasks(coalesced) == [
        [Range(users, 5, 10), Range(Partition("orders", 0), 1, 2)],
        [Range(others, 0, 7)],
    ]


def test_a_shuffle_is_refused():
    """Whatever made it."""
    kafka = source(("users", 0, 5, 10))
    with pytest.raises(RefusedError, match="shuffles events before the sink"):
        batch._tasks(behind(kafka, "org.apache.spark.ShuffleDependency", 2))


@pytest.mark.parametrize(
    "part",
    [
        Java("ParallelCollectionPartition"),
        Java("DataSourceRDDPartition", inputPartition=Java("scala.None", isDefined=False)),
        Java(
            "DataSourceRDDPartition",
            inputPartition=Java("scala.Some", isDefined=True, get=Java("RatePartition")),
        ),
    ],
    ids=["list", "nothing", "another source"],
)
def test_rows_that_are_not_kafkas_are_refused(part):
    """Nobody knows their progress."""
    with pytest.raises(RefusedError, match="do not come from Kafka"):
        batch._tasks(Java("RDD", dependencies=Seq(), partitions=[part]))
