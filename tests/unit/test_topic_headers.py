"""Headers of copies, ours and others', byte by byte.

The tables are written down from the sources of the peers: spring-kafka 4
(DeadLetterRecordManager, DeadLetterPublishingRecovererFactory, KafkaHeaders, RetryTopicHeaders),
Kafka Connect (DeadLetterQueueReporter, KIP-298), Kafka Streams (ExceptionHandlerUtils, KIP-1034)
and share groups (ShareGroupDLQRecordHelper, KIP-1191).
"""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sideline.engine.hand import Hand, due_copies
from sideline.events import Event
from sideline.topics import headers as h

EVENT = Event("users", 3, 41, 1_700_000_000_123, b"zo\xff", b"{}", (("trace", b"abc"), ("n", None)))
LETTER = h.letter_of(
    EVENT,
    group="login",
    attempt=2,
    first_failure_ms=1_700_000_001_000,
    error="builtins.ValueError",
    message="cannot spell Zoë",
    stage="handler",
    traceback="Traceback ...",
    due_ms=1_700_000_010_000,
    generation=1,
)

OURS = (
    ("sideline-origin-topic", b"users"),
    ("sideline-origin-partition", b"3"),
    ("sideline-origin-offset", b"41"),
    ("sideline-origin-timestamp", b"1700000000123"),
    ("sideline-origin-key", b"zo\xff"),
    ("sideline-group", b"login"),
    ("sideline-attempt", b"2"),
    ("sideline-generation", b"1"),
    ("sideline-first-failure", b"1700000001000"),
    ("sideline-due", b"1700000010000"),
    ("sideline-error", b"builtins.ValueError"),
    ("sideline-message", b"cannot spell Zo\xc3\xab"),
    ("sideline-stage", b"handler"),
)
SPRING = (
    ("kafka_dlt-exception-fqcn", b"builtins.ValueError"),
    ("kafka_dlt-exception-cause-fqcn", b"builtins.ValueError"),
    ("kafka_dlt-exception-message", b"cannot spell Zo\xc3\xab"),
    ("kafka_dlt-exception-stacktrace", b"Traceback ..."),
    ("kafka_dlt-original-topic", b"users"),
    # ByteBuffer.allocate(Integer.BYTES).putInt, and 8 bytes for putLong.
    ("kafka_dlt-original-partition", b"\x00\x00\x00\x03"),
    ("kafka_dlt-original-offset", b"\x00\x00\x00\x00\x00\x00\x00\x29"),
    ("kafka_dlt-original-timestamp", b"\x00\x00\x01\x8b\xcf\xe5\x68\x7b"),
    ("kafka_dlt-original-timestamp-type", b"CreateTime"),
    ("kafka_dlt-original-consumer-group", b"login"),
    # BigInteger.valueOf(...).toByteArray(): no leading zeros.
    ("retry_topic-original-timestamp", b"\x01\x8b\xcf\xe5\x68\x7b"),
    ("retry_topic-attempts", b"\x00\x00\x00\x02"),
    ("retry_topic-backoff-timestamp", b"\x01\x8b\xcf\xe5\x8f\x10"),
)
CONNECT = (
    ("__connect.errors.topic", b"users"),
    ("__connect.errors.partition", b"3"),
    ("__connect.errors.offset", b"41"),
    ("__connect.errors.connector.name", b"login"),
    ("__connect.errors.task.id", b"3"),
    ("__connect.errors.stage", b"TRANSFORMATION"),
    ("__connect.errors.class.name", b"sideline"),
    ("__connect.errors.exception.class.name", b"builtins.ValueError"),
    ("__connect.errors.exception.message", b"cannot spell Zo\xc3\xab"),
    ("__connect.errors.exception.stacktrace", b"Traceback ..."),
)
STREAMS = (
    # Throwable.toString(), getMessage(), printStackTrace(); numbers as text.
    ("__streams.errors.exception", b"java.lang.IllegalStateException: no such user: 7"),
    ("__streams.errors.message", b"no such user: 7"),
    ("__streams.errors.stacktrace", b"java.lang.IllegalStateException: no such user\n\tat A.b"),
    ("__streams.errors.topic", b"users"),
    ("__streams.errors.partition", b"3"),
    ("__streams.errors.offset", b"41"),
)
SHARE = (
    ("__dlq.errors.topic", b"users"),
    ("__dlq.errors.partition", b"3"),
    ("__dlq.errors.offset", b"41"),
    ("__dlq.errors.group", b"login"),
    ("__dlq.errors.delivery.count", b"5"),
    ("__dlq.errors.message", b"Offset delivery count exceeded the threshold."),
)
SPRING_RETRY = (
    ("kafka_original-offset", b"\x00\x00\x00\x00\x00\x00\x00\x29"),
    ("kafka_original-timestamp", b"\x00\x00\x01\x8b\xcf\xe5\x68\x7b"),
    ("kafka_original-timestamp-type", b"CreateTime"),
    ("kafka_original-topic", b"users"),
    ("kafka_original-partition", b"\x00\x00\x00\x03"),
    ("kafka_dlt-original-consumer-group", b"login"),
    ("kafka_exception-fqcn", b"org.springframework.kafka.listener.TimestampedException"),
    ("kafka_exception-cause-fqcn", b"java.lang.RuntimeException"),
    ("kafka_exception-message", b"boom"),
    # One byte without a sign: versions before 2.9.
    ("retry_topic-attempts", b"\x81"),
)


@pytest.mark.parametrize(
    ("dialect", "theirs"), [(None, ()), ("spring", SPRING), ("connect", CONNECT)]
)
def test_what_is_written_byte_by_byte(dialect, theirs):
    """A copy has the event's own headers, then ours, then the dialect's, byte by byte (F7, F8)."""
    assert h.write(EVENT.headers, LETTER, dialect) == (*EVENT.headers, *OURS, *theirs)


@pytest.mark.parametrize("dialect", [None, "spring", "connect"])
def test_what_was_written_is_read_back(dialect):
    """Reading our own copy gives back what was written, and the event as it was (F13)."""
    event = Event("users", 3, 41, 1_700_000_000_123, None, None, EVENT.headers)
    letter = h.letter_of(event, group="login", attempt=1, first_failure_ms=5, incarnation=2)
    copy = h.write(event.headers, letter, dialect)
    told = h.read(copy)
    assert told == structs.replace(letter, due_ms=None, traceback=None)
    assert told.origin == "users/3/41#2"
    assert h.unwrap(b"users/3/41#2", b"", copy) == (None, None, event.headers)
    assert h.unwrap(b"k", b"v", STREAMS) == (b"k", b"v", STREAMS)


def test_a_copy_of_a_copy_keeps_the_first_ones_headers():
    """An event that is itself a copy of ours comes back with that copy's headers (F13)."""
    once = h.write(EVENT.headers, LETTER)
    again = Event("users.login.dlq", 0, 7, 1, b"users/3/41", b"{}", once)
    twice = h.write(once, h.letter_of(again, group="mend", attempt=1, first_failure_ms=9))
    assert h.read(twice).origin == "users.login.dlq/0/7"
    assert h.read(twice).due_ms is None
    assert h.unwrap(b"x", b"{}", twice) == (b"users/3/41", b"{}", once)


@pytest.mark.parametrize(
    ("headers", "voice", "attempt", "error", "message"),
    [
        (SPRING, "spring", 2, "builtins.ValueError", "cannot spell Zoë"),
        (SPRING_RETRY, "spring", 129, "java.lang.RuntimeException", "boom"),
        (CONNECT, "connect", None, "builtins.ValueError", "cannot spell Zoë"),
        (STREAMS, "streams", None, "java.lang.IllegalStateException", "no such user: 7"),
        (SHARE, "share", 5, None, "Offset delivery count exceeded the threshold."),
    ],
)
def test_dialects_of_others_are_understood(headers, voice, attempt, error, message):
    """Spring, Connect, Kafka Streams and share groups tell origin and cause in one value (F7)."""
    told = h.read((("trace", b"abc"), *headers))
    assert told.origin == "users/3/41"
    assert (told.voice, told.attempt) == (voice, attempt)
    assert (told.error, told.message) == (error, message)
    assert told.timestamp_ms == (1_700_000_000_123 if voice == "spring" else None)


def test_spring_tells_of_a_key_that_could_not_be_read():
    """Spring names a key's failure apart from a value's."""
    told = h.read(
        (
            ("kafka_dlt-key-exception-fqcn", b"org.example.BadKey"),
            ("kafka_dlt-key-exception-message", b"bad key"),
            ("kafka_dlt-original-topic", b"users"),
        )
    )
    assert (told.error, told.message, told.stage) == ("org.example.BadKey", "bad key", "key")
    assert told.origin is None


def test_the_last_writer_is_believed():
    """A record that went through Connect's dead letters and then Spring's was written by Spring."""
    assert h.read((*CONNECT, *SPRING)).voice == "spring"
    assert h.read((*SPRING, *CONNECT)).voice == "connect"
    # Published again with our headers, it failed in Spring: its origin is where that read it.
    later = (("kafka_dlt-original-topic", b"again"), ("kafka_dlt-original-offset", b"\0" * 8))
    for dialect in (None, "spring", "connect"):
        ours = h.write((), LETTER, dialect)
        told = h.read((*ours, *later))
        assert (told.voice, told.topic, told.offset) == ("spring", "again", 0)
        assert h.unwrap(b"k", b"v", (*ours, *later))[0] == b"k"
        assert h.read((*later, *ours)).voice == "sideline"
    twice = (*CONNECT, ("__connect.errors.offset", b"99"))
    assert h.read(twice).offset == 99


@pytest.mark.parametrize(
    "value",
    [None, b"", b"-1", b"+1", b" 1", b"1_0", b"1e3", b"\xd9\xa3", b"9" * 19, b"9" * 5000, b"\xff"],
)
def test_numbers_that_make_no_sense_are_missing(value):
    """Forged, huge, negative or empty numbers are as if they were not there."""
    for name, field in (
        ("sideline-origin-partition", "partition"),
        ("sideline-origin-offset", "offset"),
        ("sideline-due", "due_ms"),
        ("sideline-attempt", "attempt"),
        ("sideline-origin-timestamp", "timestamp_ms"),
    ):
        told = h.read((("sideline-origin-topic", b"users"), (name, value)))
        assert getattr(told, field) is None, name
    huge = (("kafka_dlt-original-topic", b"users"), ("kafka_dlt-original-offset", value))
    assert h.read(huge).offset is None


def test_big_endian_numbers_of_another_size_or_sign_are_missing():
    """Spring's integers have 4 or 8 bytes and are not negative."""
    for partition in (b"\x00\x03", b"\xff\xff\xff\xff", b"\x00" * 9):
        told = h.read(
            (("kafka_dlt-original-topic", b"u"), ("kafka_dlt-original-partition", partition))
        )
        assert told.partition is None


@pytest.mark.parametrize("due", [None, b"0", b"1000005", b"253402300799999", b"-1"])
def test_a_due_time_in_headers_is_not_obeyed(due):
    """The broker's time and the policy's delay say when a copy is due, whatever is told (F8)."""
    came, delay = 1_000_000, 10_000
    headers = h.write((), LETTER)
    forged = tuple((name, due if name == "sideline-due" else value) for name, value in headers)
    copy = Event("users.login.retry.1", 0, 7, came, b"k", b"v", forged)
    hand = Hand(SimpleNamespace(next_offset=7), None, None, delay_ms=delay)
    assert due_copies(hand, [copy], 8, came + delay - 1) == ([], 7, 0.001)
    assert due_copies(hand, [copy], 8, came + delay) == ([copy], 8, 0.0)


def test_what_is_written_is_bounded():
    """However long a message or a traceback is, a copy grows by a known amount only."""
    letter = structs.replace(
        LETTER,
        error="é" * 10_000,
        message="ë" * 100_000,
        traceback="x" * 1_000_000,
        stage="s" * 9_999,
        group="g" * 9_999,
        key=b"",
    )
    for dialect in (None, "spring", "connect"):
        copy = h.write((), letter, dialect)
        assert sum(len(name) + len(value or b"") + 16 for name, value in copy) < h.ROOM_BYTES
        assert all(b"\xef\xbf\xbd" not in (value or b"") for _, value in copy)


NAMES = st.sampled_from(
    [name for table in (OURS, SPRING, CONNECT, STREAMS, SHARE) for name, _ in table]
)


@given(
    st.lists(
        st.tuples(
            st.one_of(NAMES, st.text(max_size=5)),
            st.one_of(st.none(), st.binary(max_size=40), st.from_regex(rb"-?[0-9]{1,30}")),
        ),
        max_size=12,
    )
)
def test_no_headers_make_reading_fail(headers):
    """Whatever stands in headers, reading gives a value within its limits."""
    told = h.read(tuple(headers))
    assert told.partition is None or 0 <= told.partition < 2**31
    assert told.offset is None or 0 <= told.offset < 2**63
    assert told.attempt is None or 0 <= told.attempt < 2**31
    assert told.due_ms is None or 0 <= told.due_ms < 253_402_300_800_000
    for text in (told.topic, told.group, told.error, told.message, told.stage, told.traceback):
        assert text is None or "\x00" not in text
    h.unwrap(b"k", b"v", tuple(headers))
    turn = None
    if told.voice == "sideline" and told.origin is not None and told.attempt:
        turn = (told.topic, told.partition, told.offset, told.incarnation or 0, told.attempt)
    assert h.turn_of(tuple(headers)) == turn


def test_a_copy_says_whose_turn_it_is():
    """What is asked of a copy that comes back is what was written (F8)."""
    written = h.write((("sideline-attempt", b"9"),), LETTER)
    assert h.turn_of(written) == ("users", 3, 41, LETTER.incarnation, 2)
    assert h.turn_of((*written, ("sideline-attempt", b"7"))).attempt == 7
    assert h.turn_of(EVENT.headers) is None
