"""What can be said of DataFrames and sessions without Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from sideline.engine import session as sessions
from sideline.engine.session import is_connect
from sideline.errors import ConfigurationError
from sideline.spark import session, tables
from sideline.spark.tables import Column, batch, columns, ddl, page_rows
from sideline.stack import jars


def test_a_page_is_bounded_by_its_bytes():
    """A page never holds more than its bytes or its rows, and never nothing."""
    assert page_rows(64, 64) == tables.PAGE_ROWS
    assert page_rows(64, 64 * 1024 * 1024) == 8
    assert page_rows(1, 10**12) == 1


def test_arrow_holds_exactly_what_the_ledger_does():
    """64 bits, any bytes, nulls, and times in UTC whatever zone they came in (F13)."""
    some = (
        Column("offset", "bigint"),
        Column("key", "binary"),
        Column("parked_at", "timestamp"),
        Column("timestamp", "timestamp"),
        Column("headers", tables.HEADERS),
    )
    zone = timezone(timedelta(hours=5, minutes=30))
    at = datetime(2026, 1, 31, 17, 30, 0, 123456, tzinfo=zone)
    row = {
        "offset": 2**63 - 1,
        "key": bytes(range(256)),
        "parked_at": at,
        "timestamp_ms": 1,
        "header_names": ["a", "a"],
        "header_values": [None, b"\xff"],
    }
    found = batch(some, [row, row | {"key": None, "timestamp_ms": -1}]).to_pylist()
    assert found[0]["offset"] == 2**63 - 1
    assert found[0]["key"] == bytes(range(256))
    assert found[0]["parked_at"] == at.astimezone(UTC)
    assert found[0]["timestamp"] == datetime(1970, 1, 1, 0, 0, 0, 1000, tzinfo=UTC)
    assert found[0]["headers"] == [{"name": "a", "value": None}, {"name": "a", "value": b"\xff"}]
    assert (found[1]["key"], found[1]["timestamp"]) == (None, None)


def test_payload_is_there_only_when_it_was_asked_for():
    """Whoever counts does not carry values about (S1)."""
    names = [column.name for column in columns("parked", payload=True)]
    assert {"value", "headers", "complete"} < set(names)
    assert [column.name for column in columns("history", payload=False)] == names[:-3]
    assert "`offset` bigint, " in ddl(columns("parked", payload=False))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"connector": "maven"}, "connector is 'maven'"),
        ({"slots": 0}, "slots is 0"),
        ({"slots": True}, "slots is True"),
        ({"settings": {"executor.memory": "2g"}}, "settings holds 'executor.memory'"),
        ({"settings": {"spark.task.cpus": 2}}, "settings holds 'spark.task.cpus'"),
    ],
)
def test_a_session_is_asked_for_in_words_that_it_knows(asked, said):
    """What is wrong is said before a JVM is started (E1)."""
    with pytest.raises(ConfigurationError, match=said):
        session(**asked)


@pytest.mark.parametrize("there", [True, False])
def test_a_cluster_brings_its_own_connector(monkeypatch, there):
    """Nothing is fetched; where the cluster has none, that is said, and the session ends (E1)."""
    built = []

    class Session:
        def stop(self) -> None:
            built.append("stopped")

    def build(_slots, *, settings, **_more):
        built.append(settings)
        return Session()

    def fetch(*_given, **_more):
        raise AssertionError("fetched")

    monkeypatch.setattr(sessions, "active", lambda: None)
    monkeypatch.setattr(sessions, "build", build)
    monkeypatch.setattr(sessions, "has_connector", lambda spark: there)
    monkeypatch.setattr(jars, "connector_jars", fetch)
    if there:
        assert isinstance(session(connector="cluster", settings={"spark.x": "y"}), Session)
        assert built == [{"spark.x": "y"}]
        return
    with pytest.raises(ConfigurationError, match="no Kafka connector here"):
        session(connector="cluster")
    assert built == [{}, "stopped"]


def test_a_connect_session_is_known_by_its_type():
    """Without importing Connect, whose packages may not be there."""
    made = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})
    heir = type("Mine", (made,), {})
    assert is_connect(heir())
    assert not is_connect(object())
    assert not is_connect(None)
