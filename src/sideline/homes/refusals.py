"""Ask PostgreSQL why it refuses rows, many in one round trip.

Events that will most likely fail are tried one after the other, each undone whatever it says: what
fails leaves nothing anyway. Waiting for each answer before the next question would cost two round
trips an event. psycopg's own pipeline raises the first error and forgets the others, so this one
stands on libpq's.
"""

from __future__ import annotations

import re
import select
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg import errors
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

# So many bytes are in flight at most, and so many statements: PostgreSQL answers meanwhile.
MOST_BYTES = 256 * 1024
MOST_STATEMENTS = 64
_NAME = b"sideline_refusals"
_FORGET = b"deallocate sideline_refusals"
_BACK = b"rollback to savepoint sideline_writer"
_PLACEHOLDER = re.compile(r"%([s%])")
_GONE = "the connection was lost while PostgreSQL was asked why it refuses rows"
_WAIT_MS = 1_000


def refusals(
    connection: psycopg.Connection[Any], sql: str, rows: Sequence[Sequence[str | None]]
) -> list[Exception | None]:
    """Try a statement with each row of parameters behind ``savepoint sideline_writer``.

    The error of each, or None where it would pass; nothing of it stays. Maybe not of all: the
    rest is another call's.
    """
    encoded = [[None if value is None else value.encode() for value in row] for row in _few(rows)]
    pgconn = connection.pgconn
    pgconn.enter_pipeline_mode()
    try:
        answers = _ask(pgconn, _numbered(sql).encode(), encoded)
    finally:
        if not connection.broken:
            pgconn.exit_pipeline_mode()
    prepared, *tried, _forgotten = answers
    if prepared is not None:
        raise prepared
    # Every other one is the way back.
    for failed in tried[1::2]:
        if failed is not None:
            raise failed
    return tried[::2]


def _few(rows: Sequence[Sequence[str | None]]) -> Iterator[Sequence[str | None]]:
    room = MOST_BYTES
    for row in rows[:MOST_STATEMENTS]:
        # The first goes whatever its size.
        if room < 0:
            return
        room -= sum(len(value) for value in row if value is not None)
        yield row


def _numbered(sql: str) -> str:
    """PostgreSQL's own placeholders instead of psycopg's."""
    numbers = iter(range(1, sql.count("%") + 1))
    return _PLACEHOLDER.sub(lambda found: "%" if found[1] == "%" else f"${next(numbers)}", sql)


def _ask(
    pgconn: PGconn, sql: bytes, rows: Sequence[Sequence[bytes | None]]
) -> list[Exception | None]:
    """The answers to: prepare, then for each row try and go back, then forget."""
    pgconn.send_prepare(_NAME, sql)
    pgconn.pipeline_sync()
    for row in rows:
        pgconn.send_query_prepared(_NAME, row)
        # What fails spoils everything up to here, and no more.
        pgconn.pipeline_sync()
        pgconn.send_query_params(_BACK, None)
        pgconn.pipeline_sync()
    pgconn.send_query_params(_FORGET, None)
    pgconn.pipeline_sync()
    found: list[Exception | None] = []
    answer: Exception | None = None
    results = _results(pgconn)
    while len(found) < 2 * len(rows) + 2:
        result = next(results)
        if result.status == ExecStatus.PIPELINE_SYNC:
            found.append(answer)
            answer = None
        elif result.status not in {ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK}:
            answer = errors.error_from_result(result)
    return found


def _results(pgconn: PGconn) -> Iterator[PGresult]:
    """What comes back, without a thread that waits inside of libpq."""
    nothing = 0
    while True:
        unsent = pgconn.flush()
        if pgconn.is_busy():
            _wait(pgconn, unsent=bool(unsent))
            pgconn.consume_input()
            continue
        result = pgconn.get_result()
        if result is not None:
            nothing = 0
            yield result
            continue
        # Between two answers there is one of these.
        nothing += 1
        if nothing > 1:
            raise psycopg.OperationalError(_GONE)


def _wait(pgconn: PGconn, *, unsent: bool) -> None:
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
    poll.poll(_WAIT_MS)
