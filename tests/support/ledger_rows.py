"""Rows of the ledger, written by hand as a slice that parks would leave them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sideline.cli import main
from sideline.keys import digest, mark, signed
from sideline.ledger import schema

# Where tests' time begins; each event is parked a second after the one before.
BEGIN = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)


@dataclasses.dataclass(frozen=True)
class Failed:
    """Why an event failed."""

    error: str = "ValueError"
    message: str = "cannot spell this"
    place: str = "app.py:17 in login"
    fingerprint: str = "0123456789ab"
    stage: str = "handler"
    traceback: str = "Traceback (most recent call last):\n  ...\nValueError: cannot spell this\n"


class Rows:
    """A ledger that tests fill."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.at = BEGIN
        self._partitions: set[tuple[str, str, int]] = set()

    def partition(self, pipeline: str, topic: str, number: int, **columns: Any) -> None:
        """A partition that a pipeline reads, with whatever its progress row should say."""
        self._execute(
            "insert into sideline.pipelines (name, topics) values (%s, array[%s])"
            " on conflict (name) do update set topics ="
            " array(select distinct unnest(pipelines.topics || excluded.topics))",
            pipeline,
            topic,
        )
        self._execute(
            "insert into sideline.progress (pipeline, topic, partition, next_offset)"
            " values (%s, %s, %s, 0) on conflict do nothing",
            *(pipeline, topic, number),
        )
        self._partitions.add((pipeline, topic, number))
        if columns:
            changes = ", ".join(f"{name} = %s" for name in columns)
            self._execute(
                f"update sideline.progress set {changes}"
                " where pipeline = %s and topic = %s and partition = %s",
                *(*columns.values(), pipeline, topic, number),
            )

    def park(
        self,
        key: bytes | None,
        place: tuple[str, int, int],
        failed: Failed | None = None,
        *,
        pipeline: str = "login",
        value: bytes | None = b"{}",
        headers: Sequence[tuple[str, bytes | None]] = (),
        derived: bytes | None = None,
        timestamp_ms: int = 1_769_860_800_000,
        **columns: Any,
    ) -> None:
        """An event that failed, or (without a cause) one that follows."""
        topic, partition, offset = place
        if (pipeline, topic, partition) not in self._partitions:
            self.partition(pipeline, topic, partition)
        self.at += timedelta(seconds=1)
        queue = self._queue(pipeline, topic, partition, key, derived)
        row = {
            "pipeline": pipeline,
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "queue": queue,
            "state": "parked",
            "why": "follows" if failed is None else "failed",
            "key": key,
            "value": value,
            "header_names": [name for name, _ in headers],
            "header_values": [data for _, data in headers],
            "timestamp_ms": timestamp_ms,
            "handler_version": "1a2b3c4d5e6f",
            "parked_at": self.at,
            "updated_at": self.at,
        }
        if failed is not None:
            self._count(pipeline, topic, partition, offset, failed)
            row |= {
                name: getattr(failed, name)
                for name in ("stage", "error", "message", "traceback", "fingerprint")
            }
        row |= columns
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join(f"%({name})s" for name in row)
        self.connection.execute(f"insert into sideline.events ({names}) values ({marks})", row)
        self._execute(
            "update sideline.progress set parked = parked + 1, consumed = consumed + 1"
            " where pipeline = %s and topic = %s and partition = %s",
            *(pipeline, topic, partition),
        )
        if queue is not None:
            self._execute("update sideline.queues set events = events + 1 where id = %s", queue)

    def flood(self, count: int, *, pipeline: str = "login", topic: str = "users") -> None:
        """Many keys with an event each, of two causes in turn."""
        self.partition(pipeline, topic, 0, consumed=count, parked=count, aside=count)
        for statement in _FLOOD:
            self.connection.execute(
                statement, {"pipeline": pipeline, "topic": topic, "count": count}
            )
        self.connection.commit()
        self.connection.autocommit = True
        self.connection.execute("vacuum analyze")
        self.connection.autocommit = False

    def commit(self) -> None:
        self.connection.commit()

    def _queue(
        self, pipeline: str, topic: str, partition: int, key: bytes | None, derived: bytes | None
    ) -> int | None:
        data = key if derived is None else derived
        if data is None:
            return None
        name = digest(data, derived=derived is not None)
        found = self._execute(
            "select queue from sideline.keys where pipeline = %s and topic = %s and digest = %s",
            *(pipeline, topic, name),
        ).fetchone()
        if found is not None:
            return int(found[0])
        row = self._execute(
            "insert into sideline.queues (pipeline, topic, home, digest, mark, since)"
            " values (%s, %s, %s, %s, %s, %s) returning id",
            *(pipeline, topic, partition, name, signed(mark(data)), self.at),
        ).fetchone()
        assert row is not None
        self._execute(
            "insert into sideline.keys (pipeline, topic, digest, key, derived, queue, version)"
            " values (%s, %s, %s, %s, %s, %s, 1)",
            *(pipeline, topic, name, data, derived is not None, row[0]),
        )
        self._execute(
            "update sideline.progress set aside = aside + 1"
            " where pipeline = %s and topic = %s and partition = %s",
            *(pipeline, topic, partition),
        )
        return int(row[0])

    def _count(self, pipeline: str, topic: str, partition: int, offset: int, why: Failed) -> None:
        self._execute(
            "insert into sideline.causes (pipeline, topic, partition, fingerprint, error, stage,"
            " place, message, traceback, last_offset, parked, first_at, last_at)"
            " values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, 1, %s, %s)"
            " on conflict (pipeline, fingerprint, topic, partition) do update"
            " set message = excluded.message, last_offset = excluded.last_offset,"
            " parked = causes.parked + 1, last_at = excluded.last_at",
            *(pipeline, topic, partition, why.fingerprint, why.error, why.stage, why.place),
            *(why.message, why.traceback, offset, self.at, self.at),
        )

    def _execute(self, statement: str, *values: Any) -> psycopg.Cursor[Any]:
        return self.connection.execute(statement, values)


_FLOOD = (
    "select setval(pg_get_serial_sequence('sideline.queues', 'id'), %(count)s)",
    """
    insert into sideline.queues (id, pipeline, topic, home, digest, mark, events, since)
    select n, %(pipeline)s, %(topic)s, 0, md5('k' || n)::uuid, n, 1,
           timestamptz '2026-01-31 12:00:00Z' + n / 10 * interval '1 ms'
    from generate_series(1, %(count)s) as n
    """,
    """
    insert into sideline.keys (pipeline, topic, digest, key, queue, version)
    select %(pipeline)s, %(topic)s, md5('k' || n)::uuid, convert_to('k' || n, 'UTF8'), n, 1
    from generate_series(1, %(count)s) as n
    """,
    """
    insert into sideline.events (
        pipeline, topic, partition, "offset", queue, state, why, key, value, timestamp_ms,
        stage, error, message, traceback, fingerprint, handler_version, parked_at
    )
    select %(pipeline)s, %(topic)s, 0, n, n, 'parked', 'failed',
           convert_to('k' || n, 'UTF8'), convert_to('{}', 'UTF8'), 0,
           'handler', 'ValueError', 'no', 'Traceback', 'cause' || n %% 2, '1a2b3c4d5e6f',
           timestamptz '2026-01-31 12:00:00Z' + n / 10 * interval '1 ms'
    from generate_series(1, %(count)s) as n
    """,
    """
    insert into sideline.causes (pipeline, topic, partition, fingerprint, error, stage, place,
        message, traceback, last_offset, parked, first_at)
    select %(pipeline)s, %(topic)s, 0, fingerprint, 'ValueError', 'handler', 'app.py:1 in f',
        'no', 'Traceback', max("offset"), count(*), min(parked_at)
    from sideline.events
    where pipeline = %(pipeline)s and topic = %(topic)s
    group by fingerprint
    """,
)


@pytest.fixture
def rows(database: str) -> Iterator[Rows]:
    """An empty ledger of the newest schema, to be filled."""
    with psycopg.connect(database) as connection:
        schema.migrate(connection)
        connection.commit()
        yield Rows(connection)


@pytest.fixture
def cli(
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line against the ledger; the exit code, stdout and stderr come back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIDELINE_DATABASE", database)

    def cli(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.run(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return cli


@pytest.fixture
def read(cli: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Run a command with --json that must succeed; what it printed."""

    def read(*arguments: str) -> Any:
        code, out, err = cli(*arguments, "--json")
        assert code == 0, out + err
        return json.loads(out)

    return read
