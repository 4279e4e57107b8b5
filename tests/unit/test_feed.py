"""Spark's rows behind the face of a reader: in order, once, and kept while a partition waits."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sideline.engine import feeding
from sideline.engine.feed import Feed
from sideline.engine.lease import Lease, Partition, Share
from sideline.errors import RefusedError

USERS = Partition("users", 0)
OTHERS = Partition("users", 1)


def rows(*places: tuple[int, int], **more) -> pa.RecordBatch:
    """A batch with a row for each (partition, offset)."""
    numbers, offsets = zip(*places, strict=True) if places else ((), ())
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.array(["users"] * len(places), pa.string()),
            "partition": pa.array(numbers, pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
            "timestamp": pa.array([1000 + offset for offset in offsets], pa.int64()),
            "key": pa.array([b"k"] * len(places), pa.binary()),
            "value": pa.array([b"%d" % offset for offset in offsets], pa.binary()),
        }
        | more
    )


def feed(*batches: pa.RecordBatch, bound: int = 100) -> Feed:
    shares = [Share("users", number, bound, ahead=False) for number in (0, 1)]
    return Feed(batches, shares)


def offsets(reader: Feed, partition: Partition = USERS) -> list[int]:
    return [event.offset for event in reader.span(partition).events]


def test_an_event_is_given_when_the_next_row_is_known():
    """The last row is kept back until no second row of its event can come (C1)."""
    reader = feed(rows((0, 0), (0, 1)), rows((0, 2)))
    reader.own(USERS, 0)
    assert reader.fill(0) == 2
    assert offsets(reader) == [0]
    assert reader.span(USERS).end == 1
    reader.linger(0)
    assert offsets(reader) == [0, 1]
    assert reader.linger(0) == 0
    assert offsets(reader) == [0, 1, 2]
    assert reader.span(USERS).at_end


def test_an_event_is_what_the_row_says():
    """Bytes, time, headers and further columns arrive as they are; nothing is a tombstone (C7)."""
    more = {
        "value": pa.array([None], pa.binary()),
        "key": pa.array([None], pa.binary()),
        "headers": [[{"key": "a", "value": b"1"}, {"key": "a", "value": None}]],
        "name": ["Zoë"],
    }
    reader = feed(rows((0, 7), **more))
    reader.own(USERS, 0)
    reader.fill(0)
    reader.fill(0)
    (event,) = reader.span(USERS).events
    assert (event.key, event.value, event.timestamp_ms) == (None, None, 1007)
    assert event.headers == (("a", b"1"), ("a", None))
    assert event.row == {"name": "Zoë"}
    assert event.id == "users/0/7"


def test_a_header_name_holds_no_nul():
    """The JVM brings it, the ledger cannot keep it: the handler sees what will be kept (F13)."""
    reader = feed(rows((0, 0), headers=[[{"key": "a\0b\0", "value": b"\0"}]]))
    reader.own(USERS, 0)
    reader.fill(0)
    reader.fill(0)
    (event,) = reader.span(USERS).events
    assert event.headers == (("a�b�", b"\0"),)


def test_what_is_done_does_not_come_again():
    """A batch that Spark repeats brings only what lies beyond progress (C3)."""
    reader = feed(rows(*((0, offset) for offset in range(10))))
    reader.own(USERS, 8)
    reader.fill(0)
    reader.fill(0)
    assert offsets(reader) == [8, 9]
    reader = feed(rows((0, 1), (0, 2)))
    reader.own(USERS, 5)
    reader.fill(0)
    reader.fill(0)
    assert reader.spent(USERS)


def test_rows_beyond_the_bound_are_left():
    """A lease that ends early takes nothing that is behind its bound."""
    reader = feed(rows(*((0, offset) for offset in range(10))), bound=4)
    reader.own(USERS, 0)
    reader.fill(0)
    reader.fill(0)
    assert offsets(reader) == [0, 1, 2, 3]


def test_a_partition_that_waits_keeps_its_rows():
    """A backoff loses nothing: rows come only once (F2)."""
    reader = feed(rows((0, 0), (0, 1), (0, 2)))
    reader.own(USERS, 0)
    reader.fill(0)
    reader.drop(USERS)
    assert not reader.span(USERS).events
    reader.fill(0)
    assert not reader.spent(USERS)
    reader.aim(USERS, 1)
    assert offsets(reader) == [1, 2]
    reader.done(USERS, 3)
    assert reader.spent(USERS)


def test_rows_that_were_done_cannot_be_asked_for_again():
    """Whoever goes back would find a hole where events were (K2)."""
    reader = feed(rows((0, 0), (0, 1), (0, 2)))
    reader.own(USERS, 0)
    reader.fill(0)
    reader.done(USERS, 2)
    with pytest.raises(RuntimeError, match="before 2"):
        reader.aim(USERS, 0)


def test_partitions_of_one_task_are_kept_apart():
    """Rows of several partitions in one batch each go to their own (K4)."""
    reader = feed(rows((0, 5), (0, 6), (1, 2), (0, 7), (1, 3)))
    for partition in (USERS, OTHERS):
        reader.own(partition, 0)
    reader.fill(0)
    reader.fill(0)
    assert offsets(reader) == [5, 6, 7]
    assert offsets(reader, OTHERS) == [2, 3]


def test_rows_of_a_single_partition_need_not_name_it():
    """What the lease says of them is enough, and the same rows are refused (C1, F13)."""
    unnamed = rows((0, 5), (0, 6), (0, 8)).drop_columns(["topic", "partition"])
    reader = Feed([unnamed], [Share("users", 0, 100, ahead=False)])
    reader.own(USERS, 6)
    reader.fill(0)
    reader.fill(0)
    assert [event.id for event in reader.span(USERS).events] == ["users/0/6", "users/0/8"]
    assert {event.row for event in reader.span(USERS).events} == {None}

    backwards = rows((0, 2), (0, 1)).drop_columns(["topic", "partition"])
    reader = Feed([backwards], [Share("users", 0, 100, ahead=False)])
    reader.own(USERS, 0)
    with pytest.raises(RefusedError, match="event users/0/1 behind 2"):
        _read_all(reader)


def test_rows_that_go_with_care_need_not_name_their_partition(tmp_path):
    """What the keeper's workers read from a file are the same events (F13)."""
    share = Share("users", 0, 7, ahead=False, care=True, start=5)
    lease = Lease("users", 1, 1, (share,), ends_at=0.0, fed=True)
    batches = [rows((0, 1), (0, 2)), rows((0, 4), (0, 5), (0, 6)), rows((0, 7), (0, 8))]
    file = tmp_path / "rows"
    with file.open("wb") as written:
        unnamed = (batch.drop_columns(["topic", "partition"]) for batch in batches)
        feeding._write(unnamed, lease, written)
    with pa.OSFile(str(file), "rb") as kept:
        found = list(pa.ipc.open_stream(kept))
    assert [batch.num_rows for batch in found] == [3]
    reader = Feed(found, lease.shares)
    reader.own(USERS, 5)
    reader.fill(0)
    reader.fill(0)
    assert offsets(reader) == [5, 6]


def test_rows_of_several_partitions_have_to_name_theirs():
    """Nobody guesses where an event belongs (C1)."""
    reader = feed(rows((0, 5), (0, 6)).drop_columns(["topic", "partition"]))
    reader.own(USERS, 0)
    with pytest.raises(KeyError, match="topic"):
        reader.fill(0)
    assert not offsets(reader)


def _read_all(reader: Feed) -> None:
    while not reader.spent(USERS):
        reader.fill(0)


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([rows((0, 1), (0, 1))], "several rows for event users/0/1"),
        ([rows((0, 1)), rows((0, 1))], "several rows for event users/0/1"),
        ([rows((0, 2), (0, 1))], "event users/0/1 behind 2"),
        ([rows((0, 5)), rows((0, 2), (0, 6))], "event users/0/2 behind 5"),
        ([rows((2, 5))], "event users/2/5 came to a task that does not read"),
    ],
    ids=["twice", "twice in two batches", "backwards", "backwards in two", "elsewhere"],
)
def test_rows_that_would_be_written_in_disorder_are_refused(batches, reason):
    """One row an event, in order, where it belongs; the event itself was not given out (C1)."""
    reader = feed(*batches)
    reader.own(USERS, 0)
    with pytest.raises(RefusedError, match=reason):
        _read_all(reader)
    assert not offsets(reader)


def test_rows_that_were_jumped_over_are_named():
    """Progress may have passed what comes too late: it says which, and the way back (C1, R5)."""
    reader = feed(rows((0, 3), (0, 7)), rows((0, 5)))
    reader.own(USERS, 2)
    with pytest.raises(RefusedError) as caught:
        _read_all(reader)
    assert "offsets 2 to 7\nof users/0" in caught.value.hint
    assert "sideline reprocess APP:NAME --from 0:2 --to 0:8" in caught.value.hint


def test_rows_of_one_batch_in_disorder_have_passed_nothing():
    """Refused before any of them is given out: there is nothing to apply again (C1)."""
    reader = feed(rows((0, 7), (0, 5)))
    reader.own(USERS, 2)
    with pytest.raises(RefusedError) as caught:
        _read_all(reader)
    assert "reprocess" not in caught.value.hint
