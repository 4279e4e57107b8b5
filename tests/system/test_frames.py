"""The ledger as DataFrames, read by Spark's own tasks."""

from __future__ import annotations

import pytest
from pyspark.sql import functions
from pyspark.sql.types import StringType, StructField, StructType

from sideline import Pipeline, Postgres
from sideline import spark as frames
from sideline.errors import DatabaseUnreachableError, NotFoundError, UsageError
from sideline.settings import Settings
from sideline.spark import tables
from tests.support.ledger_rows import BEGIN, Failed
from tests.support.pipelines import execute, query

BYTES = bytes(range(256))
FAR = 2**62 + 1


@pytest.fixture
def here(database):
    """Settings that name the test's database, and no Kafka."""
    return Settings(database=database)


@pytest.fixture
def story(rows):
    """Zoey's events wait; something with strange bytes, too; one was resolved, one erased."""
    rows.park(b"zoey", ("users", 0, FAR), Failed(), value='{"name": "Zoë"}'.encode())
    rows.park(b"zoey", ("users", 0, FAR + 1), value=None, headers=[("a", b"1"), ("a", None)])
    rows.park(BYTES, ("users", 1, 7), Failed("KeyError"), value=BYTES, timestamp_ms=-1)
    rows.park(b"bob", ("users", 1, 8), Failed(), timestamp_ms=2**62)
    rows.park(b"other", ("orders", 0, 1), Failed(), pipeline="orders")
    execute_in = rows.connection.execute
    execute_in(
        "update sideline.events set state = 'resolved', queue = null"
        " where topic = 'users' and \"offset\" = 8"
    )
    rows.commit()


def test_parked_events_as_they_are(spark, story, here):
    """Offsets of 64 bits, all bytes, repeated headers, times to the microsecond (F13, S1)."""
    found = frames.parked(spark, "login", settings=here).orderBy("topic", "partition", "offset")

    zoe, gone, strange = found.collect()
    assert (zoe.offset, zoe.place < gone.place, zoe.queue) == (FAR, True, gone.queue)
    assert bytes(zoe.value).decode() == '{"name": "Zoë"}'
    assert (zoe.error, zoe.why, zoe.stage, zoe.state) == (
        "ValueError",
        "failed",
        "handler",
        "parked",
    )
    assert gone.value is None
    assert gone.complete
    assert [(one.name, one.value) for one in gone.headers] == [("a", b"1"), ("a", None)]
    assert (bytes(strange.key), bytes(strange.value)) == (BYTES, BYTES)
    assert (strange.timestamp, strange.timestamp_ms) == (None, -1)
    times = found.select(functions.unix_micros("parked_at"), functions.unix_millis("timestamp"))
    begin = int(BEGIN.timestamp()) * 1_000_000 + BEGIN.microsecond
    assert times.collect()[0] == (begin + 1_000_000, 1_769_860_800_000)


def test_payloads_are_decoded_on_request(spark, story, here):
    """As text, as JSON of any shape, as a struct; what does not fit is null, bytes stay (S1)."""
    text = frames.parked(spark, "login", decode="text", settings=here).orderBy("offset")
    assert [row.value_text for row in text.collect()] == [None, '{"name": "Zoë"}', None]
    assert [row.key_text for row in text.collect()] == [None, "zoey", "zoey"]
    anything = frames.parked(spark, "login", decode="json", settings=here)
    names = anything.select(
        "offset", functions.try_variant_get("value_json", "$.name", "string").alias("name")
    )
    assert {row.offset: row.name for row in names.collect()} == {FAR: "Zoë", FAR + 1: None, 7: None}
    shape = StructType([StructField("name", StringType())])
    struct = frames.parked(spark, "login", decode=shape, settings=here)
    found = struct.where("offset = 7 or value_json.name = 'Zoë'").orderBy("offset").collect()
    assert bytes(found[0].value) == BYTES
    assert found[1].value_json.name == "Zoë"


def test_history_has_every_state(spark, story, here):
    """What was resolved is there too, whatever time its record claims to be from (S3)."""
    found = {row.offset: row for row in frames.history(spark, "login", settings=here).collect()}
    assert {offset: row.state for offset, row in found.items()} == {
        FAR: "parked",
        FAR + 1: "parked",
        7: "parked",
        8: "resolved",
    }
    assert (found[8].timestamp, found[8].timestamp_ms) == (None, 2**62)


def test_progress_has_a_row_for_each_partition(spark, story, here):
    """The accounts are the ledger's own (S4)."""
    found = frames.progress(spark, "login", settings=here).orderBy("partition").collect()
    assert [(row.topic, row.partition, row.parked, row.aside) for row in found] == [
        ("users", 0, 2, 1),
        ("users", 1, 2, 2),
    ]
    assert all(row.consumed == row.parked for row in found)


def test_many_are_read_side_by_side_each_once(spark, rows, here, monkeypatch):
    """Ranges meet without a gap and without an overlap, and no task has them all (S1)."""
    count = 2 * tables.RANGE_ROWS + 77
    rows.flood(count)
    for read in (frames.parked, frames.history):
        found = read(spark, "login", payload=False, settings=here)
        assert "value" not in found.columns
        assert found.rdd.getNumPartitions() == 3
        seen = found.agg(
            functions.count("*"), functions.countDistinct("offset"), functions.sum("offset")
        )
        assert tuple(seen.collect()[0]) == (count, count, count * (count + 1) // 2)


def test_every_action_reads_anew(spark, story, here, database):
    """A DataFrame shows what waits when it is read, not when it was made (S1)."""
    found = frames.parked(spark, "login", settings=here)
    assert found.count() == 3
    execute(
        database, "update sideline.events set state = 'dead', queue = null where why = 'failed'"
    )
    assert found.count() == 1


def test_bytes_that_are_elsewhere_are_said_to_be(spark, rows, here):
    """Without Kafka a pointer's value is not there, and does not look like a tombstone (F13)."""
    rows.park(b"k", ("users", 0, 1), Failed(), value=None, held_in="source")
    rows.commit()
    row = frames.parked(spark, "login", settings=here).collect()[0]
    assert (row.held_in, row.value, row.complete) == ("source", None, False)


def test_big_payloads_come_in_small_pages(spark, rows, here):
    """What a task holds is bounded by bytes: values of a megabyte come a few at a time."""
    for number in range(30):
        rows.park(b"k%d" % number, ("users", 0, number), Failed(), value=b"x" * 1_000_000)
    rows.commit()
    found = frames.parked(spark, "login", settings=here)
    assert found.select(functions.sum(functions.length("value"))).collect()[0][0] == 30_000_000


def test_what_is_wrong_is_said_before_spark_is_asked(spark, story, here, database):
    """An unknown pipeline, a wrong decode=, a database that is not there: one sentence (E1)."""
    with pytest.raises(NotFoundError, match="no pipeline 'logni' has run with this database"):
        frames.parked(spark, "logni", settings=here)
    with pytest.raises(UsageError, match="decode is 'JSON'"):
        frames.parked(spark, "login", decode="JSON", settings=here)
    with pytest.raises(UsageError, match="nothing to decode"):
        frames.history(spark, "login", decode="json", payload=False, settings=here)
    nowhere = Settings(database="postgresql://me:hunter2@127.0.0.1:1/nothing")
    with pytest.raises(DatabaseUnreachableError) as caught:
        frames.progress(spark, "login", settings=nowhere)
    assert "hunter2" not in str(caught.value)
    assert query(database, "select count(*) from sideline.events") == [(5,)]


def test_the_ledger_of_a_pipeline_is_where_its_sink_is(spark, story, database):
    """A pipeline stands for its own database; plans show its name and place only (E1)."""
    flow = Pipeline("login", topics="users", sink=Postgres(database))
    elsewhere = Settings(database="postgresql://me:hunter2@127.0.0.1:1/nothing")
    found = frames.parked(spark, flow, settings=elsewhere)
    assert found.count() == 3
    plan = found._jdf.queryExecution().toString()
    assert "sideline" in plan
    assert database not in plan
