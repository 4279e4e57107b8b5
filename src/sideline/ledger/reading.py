"""The ledger opened for somebody who only looks: one snapshot, nothing is made or changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from sideline.errors import NotFoundError, RefusedError
from sideline.ledger import schema
from sideline.ledger.connection import Connection, reach, unreachable
from sideline.ledger.sql import queries


@contextmanager
def opened(url: str, *, role: str) -> Iterator[Connection]:
    """A connection whose questions are all answered from one moment."""
    with understood(url), reach(url, role=role) as connection:
        connection.read_only = True
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        schema_of(connection)
        yield connection


@contextmanager
def understood(url: str) -> Iterator[None]:
    """What a role may not do, and a connection that breaks, said in a sentence."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        message = f"this role may not use sideline's tables: {error.diag.message_primary}."
        hint = "As their owner: sideline migrate --grant-to ROLE"
        raise RefusedError(message, hint=hint) from error
    except psycopg.OperationalError as error:
        raise unreachable(url, error) from error


def schema_of(connection: Connection) -> bool:
    """Whether there is a ledger; one of another version is refused."""
    have = schema.version(connection)
    if have > schema.newest():
        message = f"the database's ledger is of version {have}, newer than this sideline knows."
        raise RefusedError(message, hint="Install the newer sideline.")
    if 0 < have < schema.newest():
        message = f"the ledger is of version {have}; this sideline needs {schema.newest()}."
        raise RefusedError(message, hint="Run: sideline migrate")
    return have > 0


def waiting(connection: Connection, name: str | None = None) -> dict[str, tuple[int, int]]:
    """Pipelines by name, or the one that was asked for: events parked, keys aside."""
    rows = []
    if schema_of(connection):
        rows = connection.execute(queries()["waiting_pipelines"]).fetchall()
    found = {pipeline: (parked, aside) for pipeline, parked, aside in sorted(rows)}
    if name is None:
        return found
    if name not in found:
        message = f"no pipeline {name!r} has run with this database."
        raise NotFoundError(message, hint="`sideline status` lists those there are.")
    return {name: found[name]}
