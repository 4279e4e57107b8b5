"""What a reader keeps, and what it does not believe."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from sideline.engine import reader as module
from sideline.engine.lease import Partition
from sideline.engine.reader import Lost, Reader, Span

P0, P1 = Partition("t", 0), Partition("t", 1)


class Message:
    """As librdkafka hands it over."""

    def __init__(self, partition, offset, error=None, topic="t"):
        self._partition, self._offset, self._error = partition, offset, error
        self._topic = topic

    def error(self):
        return self._error

    def topic(self):
        return self._topic

    def partition(self):
        return self._partition

    def offset(self):
        return self._offset

    def key(self):
        return b"k"

    def value(self):
        return b"v"

    def headers(self):
        return None

    def timestamp(self):
        return (1, 1_000)


class Consumer:
    """Delivers what a test put in, and notes what was assigned."""

    def __init__(self, _properties):
        self.assigned = {}
        self.queue = []

    def incremental_assign(self, partitions):
        for found in partitions:
            assert (found.topic, found.partition) not in self.assigned, "assigned twice"
            self.assigned[found.topic, found.partition] = found.offset

    def incremental_unassign(self, partitions):
        for found in partitions:
            del self.assigned[found.topic, found.partition]

    def unassign(self):
        self.assigned.clear()

    def poll(self, _timeout):
        return self.queue.pop(0) if self.queue else None

    def consume(self, count, _timeout):
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setattr(module, "Consumer", Consumer)
    return Reader({})


def offsets(reader, partition):
    return [event.offset for event in reader.span(partition).events]


def deliver(reader, *messages):
    reader._consumer.queue.extend(messages)
    return reader.fill(0)


def end_of(partition, offset):
    return Message(partition, offset, KafkaError(KafkaError._PARTITION_EOF))


# K2


def test_a_position_behind_progress_is_not_believed(reader):
    """The consumer stands at 200, the take says 100: the range between would be gone (K2)."""
    reader.aim(P0, 200)
    deliver(reader, Message(0, 200), Message(0, 201))
    reader.own(P0, 100)
    assert offsets(reader, P0) == []
    assert reader._consumer.assigned[P0] == 100


def test_a_guess_that_falls_short_is_dropped(reader):
    """What was prefetched ends before progress: read again from there (K2)."""
    reader.aim(P0, 10)
    deliver(reader, Message(0, 10), Message(0, 11))
    reader.own(P0, 50)
    assert offsets(reader, P0) == []
    assert reader._consumer.assigned[P0] == 50


def test_what_librdkafka_fetched_ahead_counts_at_the_take(reader, monkeypatch):
    """A successor that waited has the next events already: nothing is fetched again (K2)."""
    monkeypatch.setattr(module, "BATCH", 4)
    reader.aim(P0, 10)
    reader._consumer.queue.extend(Message(0, offset) for offset in range(10, 20))
    reader.drain()
    reader.own(P0, 14)
    assert offsets(reader, P0) == list(range(14, 20))
    assert reader._consumer.assigned[P0] == 10


def test_a_guess_that_covers_progress_is_kept_and_cut(reader):
    """An unbroken range from before the take is as good as one read after it (K2)."""
    reader.aim(P0, 10)
    deliver(reader, *(Message(0, offset) for offset in range(10, 20)))
    reader.own(P0, 14)
    assert offsets(reader, P0) == list(range(14, 20))
    assert reader._consumer.assigned[P0] == 10


def test_what_was_done_is_not_covered_any_more(reader):
    """A range that was cut begins at the cut: it must not vouch for what was before (K2)."""
    reader.aim(P0, 10)
    deliver(reader, *(Message(0, offset) for offset in range(10, 20)))
    reader.done(P0, 18)
    reader.own(P0, 12)
    assert offsets(reader, P0) == []
    assert reader._consumer.assigned[P0] == 12


def test_after_a_drop_nothing_is_left(reader):
    """A partition that was lost and won again is read anew (K2)."""
    reader.aim(P0, 10)
    deliver(reader, Message(0, 10))
    reader.drop(P0)
    deliver(reader, Message(0, 11))
    assert offsets(reader, P0) == []
    reader.own(P0, 10)
    assert reader._consumer.assigned[P0] == 10


@given(
    start=st.integers(0, 50),
    gaps=st.lists(st.integers(1, 4), max_size=30),
    trailing=st.integers(0, 5),
    wanted=st.integers(0, 120),
)
def test_a_span_vouches_for_exactly_what_it_read(start, gaps, trailing, wanted):
    """Covered means: every event of the log from there to the span's end is in it (K2)."""
    log, offset = [], start
    for gap in gaps:
        offset += gap
        log.append(offset)
    span = Span(start)
    for offset in log:
        span.events.append(Message(0, offset))
        span.events[-1].offset = offset
        span.end = offset + 1
    span.end += trailing
    if span.covers(wanted):
        span.cut(wanted)
        assert [event.offset for event in span.events] == [o for o in log if o >= wanted]
        assert span.start == wanted <= span.end
    else:
        assert wanted < start or wanted > span.end


# Holes and ends


def test_the_end_of_the_log_lies_behind_holes(reader):
    """Markers of transactions take offsets that are never delivered."""
    reader.aim(P0, 0)
    deliver(reader, Message(0, 0), end_of(0, 7))
    span = reader.span(P0)
    assert (span.end, span.at_end) == (7, True)
    deliver(reader, Message(0, 9))
    assert (span.end, span.at_end) == (10, False)


def test_an_event_that_came_already_is_not_taken_twice(reader):
    """A second delivery of an offset changes nothing."""
    reader.aim(P0, 0)
    deliver(reader, Message(0, 0), Message(0, 1), Message(0, 0), Message(0, 1), Message(0, 2))
    assert offsets(reader, P0) == [0, 1, 2]


@pytest.mark.parametrize("dropped", [True, False])
def test_events_of_two_topics_are_told_apart(reader, dropped):
    """Partition 0 of one topic is not partition 0 of the other, also when that was dropped."""
    other = Partition("u", 0)
    reader.aim(P0, 0)
    reader.aim(other, 0)
    if dropped:
        reader.drop(other)
    deliver(reader, Message(0, 0), Message(0, 0, topic="u"), Message(0, 7, topic="u"))
    assert offsets(reader, P0) == [0]
    assert offsets(reader, other) == ([] if dropped else [0, 7])


# Errors among events


def lost_at(partition):
    return Message(partition, -1, KafkaError(KafkaError._AUTO_OFFSET_RESET))


@pytest.mark.parametrize("first", [True, False])
def test_events_behind_an_error_are_not_dropped(reader, first):
    """The consumer stands behind them already: a gap among them would pass as a hole."""
    reader.aim(P0, 0)
    reader.aim(P1, 0)
    if not first:
        reader._consumer.queue.append(Message(0, 0))
    reader._consumer.queue += [lost_at(1), Message(0, 1), Message(0, 2)]
    with pytest.raises(Lost) as caught:
        reader.fill(0)
    assert caught.value.partition == P1
    reader.fill(0)
    assert offsets(reader, P0) == ([1, 2] if first else [0, 1, 2])


def test_the_end_behind_an_error_is_noted(reader):
    """Nothing in a batch is forgotten because something else in it failed."""
    reader.aim(P0, 0)
    reader.aim(P1, 0)
    reader._consumer.queue += [Message(0, 0), lost_at(1), end_of(0, 3)]
    with pytest.raises(Lost):
        reader.fill(0)
    assert reader.span(P0).at_end


def test_a_refusal_by_the_broker_is_raised(reader):
    """Whoever may not read must hear of it."""
    reader.aim(P0, 0)
    error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(KafkaException):
        deliver(reader, Message(0, 0), Message(0, -1, error))
    assert offsets(reader, P0) == [0]


def test_a_broker_that_is_away_is_only_noted(reader):
    """The client comes back by itself."""
    reader.aim(P0, 0)
    deliver(reader, Message(0, -1, KafkaError(KafkaError._TRANSPORT)), Message(0, 0))
    assert offsets(reader, P0) == [0]
    assert reader.fault is not None


def test_an_error_of_a_partition_that_is_not_read_is_nobodys(reader):
    """It was dropped meanwhile."""
    reader.aim(P0, 0)
    deliver(reader, lost_at(1), Message(0, 0))
    assert offsets(reader, P0) == [0]


def test_guesses_give_way(reader):
    """What is read of partitions that the lease does not own takes no room from the others."""
    reader.aim(P0, 0)
    reader.aim(P1, 0)
    deliver(reader, Message(0, 0), Message(1, 0))
    reader.keep({P0})
    assert reader.reads(P0)
    assert not reader.reads(P1)
    assert set(reader._consumer.assigned) == {P0}
    assert reader.buffered_bytes == reader.span(P0).bytes
