"""The services under test: a stack of the bench's own, a database for every run."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
from psycopg import conninfo, sql

from bench import cpu

USERS = "create table users (id text primary key, name text, email text, seq bigint)"


@dataclasses.dataclass(frozen=True, slots=True)
class Services:
    """Where Kafka and PostgreSQL are, and which processes they are."""

    bootstrap: str
    database: str
    broker_pid: int
    postgres_pid: int

    @contextlib.contextmanager
    def fresh_database(self, *statements: str, template: str | None = None) -> Iterator[str]:
        """A new database with what ``statements`` create, dropped afterwards.

        With the URL of a ``template`` it is a copy of that one. The checkpoint keeps what earlier
        runs wrote from being flushed at this run's cost.
        """
        name = f"bench_{uuid.uuid4().hex[:8]}"
        url = conninfo.make_conninfo(self.database, dbname=name)
        create = sql.SQL("create database {}").format(sql.Identifier(name))
        if template is not None:
            origin = str(conninfo.conninfo_to_dict(template)["dbname"])
            copy = sql.SQL(" template {} strategy file_copy").format(sql.Identifier(origin))
            create += copy
        self._administer(create)
        try:
            with psycopg.connect(url, autocommit=True) as connection:
                for statement in statements:
                    connection.execute(statement)
            self._administer(sql.SQL("checkpoint"))
            yield url
        finally:
            drop = sql.SQL("drop database {} with (force)").format(sql.Identifier(name))
            self._administer(drop)

    def _administer(self, statement: sql.SQL | sql.Composed) -> None:
        # Not one connection for all: the server may have been away in between.
        with psycopg.connect(self.database, autocommit=True) as admin:
            admin.execute(statement)

    def cpu(self, contestant_pid: int) -> cpu.Cpu:
        """CPU seconds used so far by the contestant, PostgreSQL and the broker."""
        return cpu.Cpu(
            cpu.seconds(contestant_pid),
            cpu.seconds(self.postgres_pid),
            cpu.seconds(self.broker_pid),
        )


@contextlib.contextmanager
def running(
    bootstrap: str | None, database: str | None, progress: Callable[[str, str], None]
) -> Iterator[Services]:
    """Given services, or a stack of our own that is gone afterwards."""
    if bootstrap and database:
        yield describe(bootstrap, database)
        return
    from sideline.stack import Stack  # noqa: PLC0415 - not needed for given services

    with tempfile.TemporaryDirectory(prefix="sideline-bench-") as directory:
        stack = Stack(Path(directory))
        info = stack.up(fresh=True, progress=progress)
        try:
            yield describe(info.bootstrap, info.database)
        finally:
            stack.down()


def describe(bootstrap: str, database: str) -> Services:
    """Find the processes behind the addresses; they must be on this machine."""
    with psycopg.connect(database) as connection:
        backend = connection.info.backend_pid
        # While the connection stands: the backend ends with it.
        postgres_pid = psutil.Process(backend).ppid() if psutil.pid_exists(backend) else None
    broker_pid = cpu.listener(int(bootstrap.split(",", maxsplit=1)[0].rpartition(":")[2]))
    if postgres_pid is None or broker_pid is None:
        message = "broker and PostgreSQL must run on this machine: their CPU time is measured"
        raise RuntimeError(message)
    return Services(bootstrap, database, broker_pid, postgres_pid)
