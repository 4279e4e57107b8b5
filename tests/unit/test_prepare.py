"""``prepare=`` without Spark: who is to blame, what was said, which row belongs to which event."""

from __future__ import annotations

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline import Pipeline, RetryTopics
from sideline.causes import cause_of
from sideline.engine.culprits import Piece, halves, search
from sideline.engine.jvm_errors import Thrown, Told, tell
from sideline.engine.lease import Lease, Partition, Share
from sideline.engine.prepared import BACK, Note, Preparation, Rows, failure
from sideline.engine.preparing import between
from sideline.engine.steps import connector_options
from sideline.engine.worker import Access, Worker
from sideline.errors import ConfigurationError, PrepareFailed, Recoverable, RefusedError
from sideline.events import Delivery, Event

BAD = Told("ValueError", "bad", heals=False)
SPOTS = (Partition("t", 0), Partition("t", 1))


class World:
    """Events of which some fail, tried a set at a time."""

    def __init__(self, culprits, heals=False):
        self.culprits = culprits
        self.told = BAD._replace(heals=heals)
        self.tries = 0

    def __call__(self, pieces):
        self.tries += 1
        events = {
            (False, *piece.spot, offset)
            for piece in pieces
            if piece.spot is not None
            for offset in range(piece.start, piece.end)
        } | {name for piece in pieces for name in piece.back}
        return self.told if events & self.culprits else None


@given(st.sets(st.tuples(st.sampled_from((0, 1)), st.integers(0, 99)), max_size=12))
def test_halving_finds_exactly_those_that_fail(places):
    """Whoever fails by itself is found, nobody else is blamed (F3)."""
    culprits = {(False, "t", number, offset) for number, offset in places}
    pieces = [Piece(SPOTS[0], 0, 100), Piece(SPOTS[1], 0, 100)]
    found = search(pieces, World(culprits), most_tries=10_000)
    assert set(found.failing) == culprits
    assert (found.ends, found.unknown_back, found.world) == ({}, set(), None)
    assert found.nothing == (not culprits)


@given(st.sets(st.integers(0, 999), min_size=1), st.integers(1, 60))
def test_a_search_that_is_ended_keeps_what_it_knows(offsets, most):
    """What lies before the partition's end for now is known, whoever fails behind it (C1)."""
    culprits = {(False, "t", 0, offset) for offset in offsets}
    world = World(culprits)
    found = search([Piece(SPOTS[0], 0, 1000)], world, most_tries=most)
    end = found.ends.get(SPOTS[0], 1000)
    assert world.tries <= most
    assert {name for name in culprits if name[3] < end} == {
        name for name in found.failing if name[3] < end
    }


@given(st.sets(st.integers(0, 99)), st.integers(1, 5))
def test_a_partition_ends_before_the_first_culprit_too_many(offsets, most):
    """What is left of a partition is whole: all its events, but for those that fail (C1)."""
    found = search([Piece(SPOTS[0], 0, 100)], World({(False, "t", 0, n) for n in offsets}))
    found.cut(most)
    end = found.ends.get(SPOTS[0], 100)
    assert [name[3] for name in sorted(found.failing)] == [n for n in sorted(offsets) if n < end]
    assert len(found.failing) <= most
    left = [n for start, stop in between((0, end), offsets) for n in range(start, stop)]
    assert left == [n for n in range(end) if n not in offsets]


def test_one_that_fails_only_beside_others_is_not_blamed():
    """What passes by itself is not parked, whatever a bigger set said (F3)."""

    def attempt(pieces):
        return BAD if sum(piece.size for piece in pieces) > 1 else None

    assert search([Piece(SPOTS[0], 0, 8)], attempt).failing == {}


def test_nobody_is_blamed_for_the_world():
    """An outage is no event's failure, and is not searched for (F1, F2)."""
    world = World({(False, "t", 0, 3)}, heals=True)
    found = search([Piece(SPOTS[0], 0, 8)], world)
    assert (found.world, found.failing, world.tries) == (world.told, {}, 1)


def test_events_that_come_back_are_halved_too():
    """Released events fail one by one as well (R3)."""
    back = tuple((True, "t", 0, offset) for offset in range(9))
    found = search([Piece(SPOTS[0], 50, 60), Piece(None, back=back)], World({back[4]}))
    assert set(found.failing) == {back[4]}
    first, second = halves([Piece(None, back=back)])
    assert first[0].back + second[0].back == back


ABORTED = (
    "Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: "
    "Lost task 0.0 in stage 1.0 (TID 1) (host executor driver): "
)
URL = "[INVALID_URL] The url is invalid: http://a b. SQLSTATE: 22P02"
CAST = "[CAST_INVALID_INPUT] The value '{}' of the type \"STRING\" cannot be cast. SQLSTATE: 22018"


def udf(*lines):
    """What a UDF raised, as Spark tells it."""
    begin = "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback"
    frames = '  File "/app/shop.py", line 12, in price\n    return float(text)'
    text = "\n".join([f"{begin} (most recent call last):", frames, *lines, " SQLSTATE: 38000"])
    return Thrown("org.apache.spark.api.python.PythonException", text)


def chained(*lines):
    """The same, raised while something else was handled."""
    words = "During handling of the above exception, another exception occurred:"
    return udf("KeyError: 'id'", "", words, "", "Traceback (most recent call last):", " x", *lines)


@pytest.mark.parametrize(
    ("thrown", "name", "message"),
    [
        ([udf("ValueError: not a float: 'x'")], "ValueError", "not a float: 'x'"),
        ([chained("shop.Unknown: who", "", "")], "Unknown", "who"),
        (
            [
                Thrown("org.apache.spark.SparkException", ABORTED + "a.B: [X] y"),
                Thrown("org.apache.spark.SparkException", "[MALFORMED] Malformed. SQLSTATE: 22023"),
                Thrown("com.fasterxml.jackson.core.JsonParseException", "Unexpected character"),
            ],
            "SparkException",
            "[MALFORMED] Malformed.",
        ),
        (
            [
                Thrown("org.apache.spark.SparkException", "x"),
                Thrown("java.lang.ArithmeticException", "/ by zero\nmore"),
            ],
            "ArithmeticException",
            "/ by zero",
        ),
        (
            [Thrown("org.apache.spark.SparkException", ABORTED + "com.a.Strange: no\n\tat x")],
            "Strange",
            "no",
        ),
        ([Thrown("Odd", "something strange")], "Odd", "something strange"),
        ([], "SparkException", "no reason given"),
    ],
)
def test_what_the_jvm_says_is_told_in_a_sentence(thrown, name, message):
    """The class and the message of what happened to the row, nothing of how Spark noticed."""
    assert tell(thrown) == Told(name, message, heals=False)


@pytest.mark.parametrize(
    "thrown",
    [
        ("org.apache.kafka.common.errors.TimeoutException", "Timeout expired"),
        ("java.net.ConnectException", "Connection refused"),
        ("java.io.IOException", "No space left on device"),
        ("org.apache.spark.SparkException", ABORTED + "ExecutorLostFailure (executor 3 exited)"),
        ("org.apache.spark.SparkException", ABORTED + "java.net.SocketException: reset"),
    ],
)
def test_the_world_is_told_from_the_event(thrown):
    """A lost broker or executor heals, and parks nobody (F1)."""
    assert tell([Thrown("org.apache.spark.SparkException", "x"), Thrown(*thrown)]).heals


QUOTED = "java.net.SocketException: reset"


@pytest.mark.parametrize(
    "thrown",
    [
        [Thrown("org.apache.spark.SparkNumberFormatException", CAST.format(QUOTED))],
        [
            Thrown("org.apache.spark.SparkException", ABORTED + f"a.B: {CAST.format(QUOTED)}"),
            Thrown("a.B", CAST.format(f"x\n\tat y\nCaused by: {QUOTED}\n\tat z")),
        ],
        [Thrown("a.B", URL), Thrown("java.net.URISyntaxException", "Illegal character")],
        [udf(f"ValueError: cannot read {QUOTED}", f"Caused by: {QUOTED}")],
        [udf("ValueError: not", "Traceback (most recent call last):", "ConnectionError: reset")],
        [Thrown("a.B", CAST.format(udf("ConnectionError: reset").message))],
    ],
    ids=["cast", "stack trace", "address", "UDF", "traceback", "traceback in the JVM"],
)
def test_an_event_that_quotes_the_world_is_to_blame_all_the_same(thrown):
    """Or one event would keep its pipeline waiting for ever (F1, F3)."""
    assert not tell(thrown).heals


class Shop(Recoverable):
    """A user's own word for what heals."""


class BusyError(Exception):
    """One that only ``recoverable=`` knows."""


@pytest.mark.parametrize(
    ("line", "heals"),
    [
        ("ConnectionRefusedError: no", True),
        ("TimeoutError", True),
        ("sideline.errors.Recoverable: later", True),
        (f"{__name__}.Shop: later", True),
        (f"{__name__}.BusyError: later", True),
        ("requests.exceptions.ConnectionError: no", True),
        ("elsewhere.BusyError: later", False),
        ("sideline.errors.NonRecoverable: never", False),
        ("OSError: no", False),
        ("KeyError: 'name'", False),
    ],
)
def test_what_heals_in_a_udf_parks_nobody(line, heals):
    """By the same white list as what a handler raises, as far as a class can tell (F1, F2)."""
    assert tell([udf(line)], rules=(BusyError,)).heals is heals


def test_a_failure_bears_the_name_that_the_jvm_gave_it():
    """Causes are told apart by what happened in the JVM."""
    error = failure("SparkException", "[X] no")
    assert issubclass(type(error), PrepareFailed)
    cause = cause_of(error, "prepare")
    assert (cause.error, cause.message, cause.stage) == ("SparkException", "[X] no", "prepare")
    assert cause.fingerprint != cause_of(failure("ValueError", "[X] no"), "prepare").fingerprint


def rows(folder, table, note=None):
    """What a task leaves in a folder."""
    with (
        pa.OSFile(str(folder / "rows.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    note = note or Note({}, frozenset())
    (folder / "note.json").write_bytes(orjson.dumps(note.dump()))
    return Rows.read(str(folder))


def table(*ids, **columns):
    back, topic, partition, offset = (list(part) for part in zip(*ids, strict=True))
    return pa.table(
        {
            BACK: pa.array(back, pa.bool_()),
            "topic": pa.array(topic, pa.string()),
            "partition": pa.array(partition, pa.int32()),
            "offset": pa.array(offset, pa.int64()),
            **columns,
        }
    )


def event(topic, partition, offset, *, replayed=False):
    return Event(topic, partition, offset, 0, b"k", b"v", (), Delivery(replayed=replayed))


def test_rows_belong_to_their_events(tmp_path):
    """By topic, partition and offset; live and released ones apart; no row: left out."""
    note = Note({(False, "b", 0, 5): ("ValueError", "bad")}, frozenset({(True, "b", 0, 3)}))
    found = rows(
        tmp_path,
        table(
            (False, "a", 0, 1), (False, "a", 1, 1), (False, "b", 0, 2**62), (True, "b", 0, 3),
            n=[1, 2, 3, 4],
        ),
        note,
    )  # fmt: skip
    assert found.row(event("a", 0, 1)) == {"n": 1}
    assert found.row(event("a", 1, 1)) == {"n": 2}
    assert found.row(event("b", 0, 2**62)) == {"n": 3}
    assert found.row(event("b", 0, 3)) is None
    assert found.leaves_out(event("b", 0, 3))
    assert found.row(event("b", 0, 3, replayed=True)) == {"n": 4}
    assert not found.knows(event("b", 0, 4, replayed=True))
    assert not found.leaves_out(event("b", 0, 5))
    with pytest.raises(PrepareFailed, match="bad"):
        found.row(event("b", 0, 5))


def test_a_step_that_only_filters_has_empty_rows(tmp_path):
    """An event that stays is not taken for one that was left out."""
    found = rows(tmp_path, table((False, "a", 0, 1), (False, "a", 0, 7)))
    assert found.row(event("a", 0, 7)) == {}
    assert found.row(event("a", 0, 2)) is None


def test_several_rows_of_an_event_are_refused(tmp_path):
    """An event is one row, or what it does would depend on chance (C3)."""
    with pytest.raises(RefusedError, match="several rows of event a/0/7"):
        rows(tmp_path, table((False, "a", 0, 1), (False, "a", 0, 7), (False, "a", 0, 7)))


def test_handlers_see_the_row_and_the_record(tmp_path):
    """The bytes are the record's own, whatever prepare= made of them (F13)."""
    flow = Pipeline("login", topics="a", prepare=lambda frame: frame)
    seen = []
    flow.handler(lambda one: seen.append((one.value, one.row)))
    before = flow.version
    preparation = Preparation(flow)
    preparation.rows = rows(tmp_path, table((False, "a", 0, 1), n=[1]))
    assert flow.handle(event("a", 0, 1)) is None
    assert flow.handle(event("a", 0, 2)) == ()
    assert seen == [(b"v", {"n": 1})]
    assert before != Pipeline("login", topics="a").version


def test_a_worker_without_spark_says_so():
    """Rows come from Spark; without it nothing is read, and nothing is parked (E1)."""
    flow = Pipeline("login", topics="a", prepare=lambda frame: frame)
    flow.handler(lambda one: None)
    worker = Worker(flow, Access("postgresql://127.0.0.1:1/nothing", {}))
    report = worker.work(Lease("login", 1, 1, (Share("a", 0),), 2.0**40))
    assert report.failure["stage"] == "setup"
    assert "needs Spark" in report.failure["message"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prepare": 7}, "prepare is 7"),
        ({"prepare": lambda: None}, "takes the DataFrame"),
        (
            {"prepare": lambda df: df, "on_failure": RetryTopics(), "independent": True},
            "retry topics",
        ),
    ],
)
def test_what_prepare_cannot_be_is_refused(options, said):
    """Refused where it is declared, with the reason (E1)."""
    with pytest.raises(ConfigurationError, match=said):
        Pipeline("login", topics="users", **options)


def test_a_query_has_its_own_steps():
    """Two doors for one step would be one too many (E1)."""
    flow = Pipeline("login", topics="users", prepare=lambda df: df)
    with pytest.raises(ConfigurationError, match="nothing to do"):
        flow.foreach_batch(None, 0)


def test_listeners_that_sparks_connector_cannot_use_are_refused():
    """Rather than a connection that never comes about; no secret is told (E1)."""
    plain = {"bootstrap.servers": "broker.example:9092", "client.id": "x"}
    assert connector_options(plain) == {"kafka.bootstrap.servers": "broker.example:9092"}
    with pytest.raises(ConfigurationError, match=r"sasl\.password") as caught:
        connector_options(plain | {"sasl.password": "hunter2"})
    assert "hunter2" not in str(caught.value)
