"""The ledger's tables: made, brought up to date and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from sideline.errors import RefusedError
from sideline.ledger.sql import Migration, migrations, queries

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

# Any number that nobody else uses: two `sideline migrate` at once take turns.
_MIGRATION_LOCK = 0x51DE11E


def newest() -> int:
    """The schema that this code needs."""
    return migrations()[-1].number


def version(connection: Connection) -> int:
    """The schema that the database has; 0: none."""
    found = connection.execute(queries()["has_schema"]).fetchone()
    if found is None or not found[0]:
        return 0
    row = connection.execute(queries()["schema_version"]).fetchone()
    return int(row[0]) if row else 0


def pending(connection: Connection) -> tuple[Migration, ...]:
    """What is still to be applied."""
    have = version(connection)
    return tuple(migration for migration in migrations() if migration.number > have)


def migrate(connection: Connection) -> tuple[Migration, ...]:
    """Apply what is missing, in one transaction; returns what was applied."""
    with connection.transaction():
        connection.execute("select pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
        missing = pending(connection)
        for migration in missing:
            connection.execute(migration.sql)
            connection.execute(
                queries()["record_migration"],
                {"number": migration.number, "name": migration.name},
            )
    return missing


def grants(role: str) -> list[sql.Composed]:
    """What a role needs to run pipelines: rows, never tables."""
    name = sql.Identifier(role)
    return [
        sql.SQL("grant usage on schema sideline to {}").format(name),
        sql.SQL(
            "grant select, insert, update, delete on all tables in schema sideline to {}"
        ).format(name),
        # Who did what is only ever added to.
        sql.SQL("revoke update, delete, truncate on sideline.audit from {}").format(name),
    ]


def grant(connection: Connection, role: str) -> None:
    """Let a role run pipelines."""
    with connection.transaction():
        for statement in grants(role):
            connection.execute(statement)


def script(*, since: int = 0, grant_to: str | None = None) -> str:
    """The migrations as one SQL script, for a DBA to read and run."""
    steps: list[str] = []
    for migration in migrations():
        if migration.number > since:
            record = (
                "insert into sideline.migrations (number, name) "
                f"values ({migration.number}, '{migration.name}');"
            )
            steps.append(f"{migration.sql.strip()}\n\n{record}")
    if grant_to is not None:
        steps.extend(f"{statement.as_string()};" for statement in grants(grant_to))
    return "begin;\n\n" + "\n\n".join(steps) + "\n\ncommit;\n"


def ensure(connection: Connection) -> None:
    """Make the tables in a database that has none; refuse a schema of another version."""
    try:
        have = version(connection)
    except psycopg.errors.InsufficientPrivilege as error:
        connection.rollback()
        message = f"this role may not use sideline's tables: {error.diag.message_primary}."
        hint = f"As their owner: sideline migrate --grant-to {connection.info.user}"
        raise RefusedError(message, hint=hint) from error
    if have == newest():
        connection.rollback()
        return
    if have > newest():
        message = f"the database's ledger is of version {have}, newer than this sideline knows."
        raise RefusedError(message, hint="Install the newer sideline.")
    if have:
        message = f"the database's ledger is of version {have}; this sideline needs {newest()}."
        raise RefusedError(message, hint="Run: sideline migrate")
    try:
        connection.rollback()
        migrate(connection)
    except psycopg.errors.InsufficientPrivilege as error:
        message = "the database has no sideline tables, and this role may not make them."
        hint = "Give `sideline migrate --sql` to your DBA, or run `sideline migrate` as an owner."
        raise RefusedError(message, hint=hint) from error
