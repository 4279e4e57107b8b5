"""Try something inside a transaction, and be able to go on when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psycopg

from sideline.classify import kind_of

# How many events are undone before the server's prepared statements are forgotten.
UNDONE_UNTIL_FORGOTTEN = 500
_TIMEOUT = "select current_setting('statement_timeout') <> '0'"
_UNDO = b"rollback to savepoint sideline_writer; release savepoint sideline_writer"
# Between events that are applied alone: one round trip.
_KEEP_AND_BEGIN = "release savepoint sideline_writer; savepoint sideline_writer"
_UNDO_AND_BEGIN = b"rollback to savepoint sideline_writer"
# What PostgreSQL says of a savepoint whose transaction is over.
_NO_SAVEPOINT = "3B001"
_NO_TRANSACTION = "25P01"
GONE = frozenset({_NO_SAVEPOINT, _NO_TRANSACTION})
# What it says to the one of two that gives way.
DEADLOCK = "40P01"


class Ended(Exception):  # noqa: N818 - a fact, not an error
    """A statement of the user's ended the transaction: a savepoint of ours is no longer there."""


class Savepoints:
    """One savepoint at a time, on one connection."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._undone = 0

    def attempt(
        self,
        act: Callable[[], None],
        *,
        quick: bool = False,
        forgives: Callable[[Exception], bool] | None = None,
    ) -> Exception | None:
        """Do something in a savepoint: None, or the data error that undid it.

        Everything else is raised, with the transaction left as it is. ``quick``: savepoint and
        statements go in one round trip (not for SQL of the user's, which may be several).
        """
        try:
            with self._in_one_round_trip() if quick else nullcontext():
                self._connection.execute("savepoint sideline_writer")
                act()
                self._connection.execute("release savepoint sideline_writer")
        except Exception as error:
            if not (forgives or is_data)(error) and not is_timeout(error):
                raise
            self._undo(_UNDO)
            # Without a timeout of its own, a statement was cancelled by a person.
            if is_timeout(error) and not self._has_timeout():
                raise
            return error
        return None

    def attempt_next(
        self, act: Callable[[], None], forgives: Callable[[Exception], bool]
    ) -> Exception | None:
        """Like `attempt`, in a savepoint that is there already, and there is one afterwards."""
        try:
            act()
        except Exception as error:
            if not forgives(error) and not is_timeout(error):
                raise
            self._undo(_UNDO_AND_BEGIN)
            if is_timeout(error) and not self._has_timeout():
                raise
            return error
        with _noticing():
            self._connection.execute(_KEEP_AND_BEGIN, prepare=False)
        return None

    def _undo(self, sql: bytes) -> None:
        # Not by `execute`: psycopg forgets all prepared statements at the word ROLLBACK, though
        # they outlive it, and planning a statement anew costs more than the event itself. Now and
        # then it should: what failed while it was prepared stays in the server under no name.
        self._undone += 1
        with _noticing():
            if self._undone % UNDONE_UNTIL_FORGOTTEN == 0:
                self._connection.execute(sql, prepare=False)
                return
            result = self._connection.pgconn.exec_(sql)
            if result.status != psycopg.pq.ExecStatus.COMMAND_OK:
                raise psycopg.errors.error_from_result(result)

    @contextmanager
    def _in_one_round_trip(self) -> Iterator[None]:
        with quietly(), self._connection.pipeline():
            yield

    def _has_timeout(self) -> bool:
        row = self._connection.execute(_TIMEOUT).fetchone()
        return bool(row and row[0])


@contextmanager
def _noticing() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate in GONE:
            raise Ended from error
        raise


def is_data(error: Exception) -> bool:
    """Whether it is about the row."""
    return kind_of(error) == "data"


def is_data_or_sql(error: Exception) -> bool:
    """Whether it is about the row, or PostgreSQL does not understand the statement."""
    return is_data(error) or str(getattr(error, "sqlstate", "")).startswith("42")


def is_timeout(error: Exception) -> bool:
    """Whether a statement took longer than it may, or was cancelled."""
    return getattr(error, "sqlstate", None) == "57014"


class _Aborted(logging.Filter):
    """Not what psycopg says about the statements behind one that failed: that one is raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("error ignored terminating")


_ABORTED = _Aborted()


@contextmanager
def quietly() -> Iterator[None]:
    """Without psycopg's words about statements that were dropped behind one that failed."""
    logger = logging.getLogger("psycopg")
    logger.addFilter(_ABORTED)
    try:
        yield
    finally:
        logger.removeFilter(_ABORTED)
