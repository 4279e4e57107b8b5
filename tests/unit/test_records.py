"""What may be published, and what is refused in a sentence."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from sideline import records
from sideline.errors import ConfigurationError, UsageError
from sideline.producing import Options, client_properties
from sideline.settings import Settings

GOOD = {
    "delivery": "exactly-once",
    "transactional_id": None,
    "delivery_timeout": "2m",
    "transaction_timeout": "1m",
    "linger": "10ms",
    "batch_bytes": 1 << 19,
    "compression": "lz4",
    "partitioner": "murmur2_random",
    "buffer_records": 1000,
    "buffer_bytes": 1 << 20,
}


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (None, None),
        (b"", b""),
        (b"\xff", b"\xff"),
        ("Zoë", "Zoë".encode()),
        ("", b""),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        ({"id": 7, "name": "Zoë"}, '{"id":7,"name":"Zoë"}'.encode()),
        ([1, None, True], b"[1,null,true]"),
        (7, b"7"),
    ],
)
def test_values_become_bytes(value, data):
    """Bytes and text as they are, None stays None, the rest is JSON (P1)."""
    assert records.value_bytes(value) == data


NEST: list = []
NEST.append(NEST)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        {1: "a"},
        2**70,
        "\ud800",
        {"a": [math.nan]},
        (math.inf,),
        NEST,
    ],
    ids=["set", "object", "number-key", "huge", "surrogate", "nan", "infinity", "endless"],
)
def test_values_that_are_neither_bytes_nor_json_are_refused(value):
    """Nothing is changed without a word: JSON has no NaN, no 2**70 and no sets (P1)."""
    with pytest.raises(UsageError):
        records.value_bytes(value)


@pytest.mark.parametrize(
    "key", [5, 1.5, ["a"], object(), "\ud800"], ids=["int", "float", "list", "object", "surrogate"]
)
def test_keys_are_bytes_or_text(key):
    """A number is not made into some text that the other side spells differently (P1)."""
    with pytest.raises(UsageError):
        records.key_bytes(key)


def test_headers_keep_order_and_duplicates():
    """As Kafka keeps them; null is a value (P1)."""
    given = [("a", "1"), ("b", None), ("a", b"2")]

    assert records.headers_list(given) == [("a", b"1"), ("b", None), ("a", b"2")]
    assert records.headers_list({"a": memoryview(b"x")}) == [("a", b"x")]


@pytest.mark.parametrize(
    "headers",
    [5, "ab", ["a"], [("a", 1)], {b"a": "1"}, [("a", "b", "c")], {"a\0b": "1"}, {"\ud800": "1"}],
    ids=repr,
)
def test_headers_of_another_shape_are_refused(headers):
    """Pairs of text and bytes, nothing else (P1)."""
    with pytest.raises(UsageError):
        records.headers_list(headers)


def test_timestamps_are_milliseconds_or_times_with_a_zone():
    """Zero is refused: librdkafka would take it for now (P1)."""
    assert records.milliseconds(None) == 0
    assert records.milliseconds(1_700_000_000_123) == 1_700_000_000_123
    assert records.milliseconds(datetime(2026, 1, 1, tzinfo=UTC)) == 1_767_225_600_000
    for bad in (0, -1, 2**63, True, 1.5, "now", datetime(2026, 1, 1)):  # noqa: DTZ001
        with pytest.raises(UsageError):
            records.milliseconds(bad)


def test_the_defaults_are_safe():
    """Acks of all, idempotence, at most five requests under way (P1)."""
    made = Options(**GOOD).properties()

    assert made["acks"] == "all"
    assert made["enable.idempotence"] is True
    assert made["max.in.flight.requests.per.connection"] <= 5
    assert made["message.timeout.ms"] == 120_000


def test_weaker_modes_have_names_and_keep_the_order():
    """At least once never has two requests under way; at most once never repeats one (P1)."""
    least = Options(**GOOD | {"delivery": "at-least-once"}).properties()
    most = Options(**GOOD | {"delivery": "at-most-once"}).properties()

    assert (least["acks"], least["max.in.flight.requests.per.connection"]) == ("all", 1)
    assert not least["enable.idempotence"]
    assert most["retries"] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"delivery": "sometimes"},
        {"delivery": "at-most-once", "transactional_id": "a"},
        {"transactional_id": " "},
        {"transactional_id": 5},
        {"delivery_timeout": "soon"},
        {"delivery_timeout": 0},
        {"linger": "2h"},
        {"batch_bytes": 5},
        {"batch_bytes": "1k"},
        {"buffer_records": True},
        {"buffer_bytes": 1 << 40},
        {"compression": "rar"},
        {"partitioner": "mine"},
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(wrong):
    """One sentence each, before anything is connected (P1)."""
    with pytest.raises(ConfigurationError):
        Options(**GOOD | wrong).properties()


def test_client_properties_obey_the_list_of_the_settings():
    """What would break a promise cannot be set here either (P1)."""
    found = Settings("localhost:9092")

    assert client_properties(None, found, {"client.id": "shop"})["client.id"] == "shop"
    for name in ("acks", "enable.ssl.certificate.verification", "transactional.id", "sasl.pasword"):
        with pytest.raises(ConfigurationError, match=name):
            client_properties(None, found, {name: "0"})
    with pytest.raises(ConfigurationError):
        client_properties(None, found, {"security.protocol": "none"})
    with pytest.raises(UsageError):
        client_properties("localhost:1", found, None)


def test_publishing_needs_no_spark_and_declaring_no_kafka():
    """`from sideline import Publisher` is quick, and a pipeline's declaration quicker (E1)."""
    code = (
        "import sys, sideline; assert 'confluent_kafka' not in sys.modules; "
        "from sideline import Publisher; assert 'pyspark' not in sys.modules; "
        "assert Publisher.__module__ == 'sideline.publisher'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
