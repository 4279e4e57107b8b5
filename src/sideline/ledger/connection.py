"""The one place that opens a connection to PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, LiteralString

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus

from sideline.errors import ConfigurationError, DatabaseUnreachableError, RefusedError

Connection = psycopg.Connection[Any]

CONNECT_SECONDS = 10
# What the catalogue says of unique indexes came with 15.
OLDEST_SERVER = 150_000
# Ours only: whoever finds a frozen holder of a row ends no session but these.
APPLICATION = "sideline"


def connect(url: str, *, role: str, autocommit: bool = False) -> Connection:
    """A direct session, named after its role, that notices a dead peer within seconds."""
    options: dict[str, Any] = {
        "application_name": f"{APPLICATION} {role}"[:63],
        "connect_timeout": CONNECT_SECONDS,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
    }
    connection = psycopg.connect(url, autocommit=autocommit, **options)
    _refuse_pooler(connection)
    return connection


def reach(url: str, *, role: str, autocommit: bool = False) -> Connection:
    """Like `connect`, with one sentence for whoever started the command."""
    try:
        return _new_enough(connect(url, role=role, autocommit=autocommit))
    except psycopg.OperationalError as error:
        raise unreachable(url, error) from error
    except psycopg.ProgrammingError as error:
        message = "the database setting is not a PostgreSQL URL."
        hint = "Write it like postgresql://user@host:5432/name."
        raise ConfigurationError(message, hint=hint) from error


def _new_enough(connection: Connection) -> Connection:
    if connection.info.server_version < OLDEST_SERVER:
        version = connection.info.server_version // 10_000
        connection.close()
        message = f"the database is PostgreSQL {version}; sideline needs 15 or later."
        raise RefusedError(message)
    return connection


def unreachable(url: str, error: psycopg.Error) -> DatabaseUnreachableError:
    """The sentence for a database that does not let us in; never with the password."""
    reason = str(error).strip().splitlines()[-1:] or ["no answer"]
    return DatabaseUnreachableError(
        f"PostgreSQL at {place(url)} cannot be used: {reason[0].strip()}",
        hint="Check SIDELINE_DATABASE, or start the embedded stack with: sideline stack up",
    )


def place(url: str) -> str:
    """Host, port and database of a URL: what may be shown of it."""
    try:
        parts = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return "(malformed URL)"
    host = parts.get("host") or parts.get("hostaddr") or "localhost"
    return f"{host}:{parts.get('port') or 5432}/{parts.get('dbname') or parts.get('user') or ''}"


def wait_for(url: str, *, role: str, until: float) -> Connection:
    """Try again until the monotonic time ``until``; the last error if it never works."""
    pause = 0.05
    while True:
        try:
            return connect(url, role=role)
        except psycopg.OperationalError:
            if time.monotonic() + pause > until:
                raise
            time.sleep(pause)
            pause = min(1.0, pause * 2)


def ask_alone(
    connection: Connection, query: LiteralString, given: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """What a statement answers that is a transaction of its own: one round trip, not three."""
    if connection.info.transaction_status != TransactionStatus.IDLE:
        # Something was asked before: that ends with it.
        rows = connection.execute(query, given).fetchall()
        connection.commit()
        return rows
    connection.autocommit = True
    try:
        return connection.execute(query, given).fetchall()
    finally:
        if not (connection.broken or connection.closed):
            connection.autocommit = False


def _refuse_pooler(connection: Connection) -> None:
    # A pooler makes up the process id of the greeting; behind it neither session locks nor
    # backend ids mean anything.
    row = connection.execute("select pg_backend_pid()").fetchone()
    if not connection.autocommit:
        connection.rollback()
    if row is None or row[0] != connection.info.backend_pid:
        connection.close()
        message = (
            "the database is reached through a pooler, behind which session locks mean nothing."
        )
        hint = "Give SIDELINE_DATABASE the address of PostgreSQL itself."
        raise RefusedError(message, hint=hint)
