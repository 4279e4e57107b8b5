"""Effects of a slice become rows, inside the transaction that the caller opened and fenced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import psycopg

from sideline.classify import kind_of
from sideline.effects import Delete, Effect, Execute, Insert, Upsert
from sideline.errors import ConfigurationError
from sideline.homes.catalogue import Catalogue, UnknownNameError
from sideline.homes.names import quote
from sideline.homes.planning import Bulk, Ordered, Plan, Work, plan, related
from sideline.homes.statements import Shape, Shapes

__all__ = ["Work", "Writer", "Written"]

# The literals of a statement stay in the processor's cache, and an array in one piece.
ROWS_PER_STATEMENT = 5_000
# How many events share a savepoint when they are applied in log order, first and after errors.
RUN_SIZES = (64, 8, 1)
_STATEMENT_TIMEOUT = "57014"
_TIMEOUT = "select current_setting('statement_timeout') <> '0'"
_UNDO = "rollback to savepoint sideline_writer; release savepoint sideline_writer"


class Written(NamedTuple):
    """What became of a batch; everything that is not named here was applied."""

    failed: dict[int, BaseException]
    """Index in the batch: its own error. None of its effects stays in any table."""
    followers: frozenset[int]
    """Later events of a failed key: not applied."""


_ALL_APPLIED = Written({}, frozenset())


class Writer:
    """Writes batches on one connection; keeps what it learned about the tables.

    It never commits or rolls back the transaction, only savepoints of its own. Errors that are
    not a row's own (a lost connection, a missing right) are raised as they came.
    """

    def __init__(self, connection: psycopg.Connection[Any], *, fold: bool = True) -> None:
        self._connection = connection
        self._fold = fold
        self._catalogue = Catalogue(connection)
        self._shapes = Shapes(self._catalogue)

    def write(
        self, batch: Sequence[Work], *, hold_followers: bool = True, optimistic: bool = False
    ) -> Written:
        """Apply a batch; an event that fails for a reason of its own fails alone.

        ``optimistic`` saves the savepoint: a data error is then raised, and the caller rolls
        back, opens the transaction anew and asks again without it.
        """
        made = plan(batch, self._shapes, folded=self._fold)
        if optimistic and not made.rejected:
            self._run(made)
            return _ALL_APPLIED
        alone = self._write_together(batch, made)
        if not alone:
            return _ALL_APPLIED
        return self._write_alone(batch, alone, hold_followers=hold_followers)

    def apply_one(self, effects: Sequence[Effect]) -> None:
        """Apply one event's effects in their order, by plain statements; raises what fails."""
        self._apply(effects)

    def check(self, effect: Effect) -> None:
        """Refuse at start what could never be written, with what would mend it."""
        if not isinstance(effect, Execute):
            self._check_row(effect)

    def notes(self) -> list[str]:
        """Sentences about tables that are not folded, and why."""
        return [
            f"table {table.label} is not folded: {reason}"
            for table in self._catalogue.seen()
            if (reason := table.in_log_order or table.unfolded)
        ]

    def forget(self) -> None:
        """Read the catalogue anew: a statement did not fit it, or somebody changed a table."""
        self._catalogue.forget()
        self._shapes.forget()

    # -- together

    def _write_together(self, batch: Sequence[Work], made: Plan) -> Sequence[int]:
        """Write what can be written in bulk; returns what is still to be applied, in log order."""
        held = related(batch, made, made.rejected) if made.rejected else set()
        if held and made.opaque:
            return range(len(batch))
        if held:
            made = plan(batch, self._shapes, folded=self._fold, without=held)
        if self._attempt(lambda: self._run(made)) is not None:
            return range(len(batch))
        return sorted(held)

    def _run(self, made: Plan) -> None:
        for step in made.steps:
            if isinstance(step, Ordered):
                self._apply([effect for _, effect in step.effects])
            else:
                self._bulk(step)
        if made.deferrable:
            self._make_immediate()

    def _bulk(self, step: Bulk) -> None:
        for start in range(0, len(step.ids), ROWS_PER_STATEMENT):
            part = [column[start : start + ROWS_PER_STATEMENT] for column in step.columns]
            self._connection.execute(step.shape.sql, step.shape.arguments(part), prepare=True)

    def _make_immediate(self) -> None:
        self._connection.execute("set constraints all immediate")

    # -- in log order

    def _write_alone(
        self, batch: Sequence[Work], events: Sequence[int], *, hold_followers: bool
    ) -> Written:
        """Apply events in log order, as if each had a savepoint across all its tables."""
        failed: dict[int, BaseException] = {}
        failed_keys: set[Hashable] = set()
        followers: set[int] = set()
        # Runs that succeed as a whole need one savepoint; those that do not are cut smaller.
        waiting = _runs(events, RUN_SIZES[0])
        while waiting:
            run = waiting.pop()
            followers.update(event for event in run if batch[event].key in failed_keys)
            run = [event for event in run if event not in followers]
            error = self._attempt(lambda run=run: self._apply_events(batch, run))  # type: ignore[misc]
            if error is None:
                continue
            if len(run) > 1:
                waiting.extend(_runs(run, next(size for size in RUN_SIZES if size < len(run))))
                continue
            failed[run[0]] = error
            if hold_followers and batch[run[0]].key is not None:
                failed_keys.add(batch[run[0]].key)
        return Written(failed, frozenset(followers))

    def _apply_events(self, batch: Sequence[Work], events: Sequence[int]) -> None:
        effects = [effect for event in events for effect in batch[event].effects]
        self._apply(effects)
        if any(map(self._may_wait, effects)):
            self._make_immediate()

    def _may_wait(self, effect: Effect) -> bool:
        """Whether a constraint may wait until COMMIT with its complaint about the effect."""
        return isinstance(effect, Execute) or self._shape(effect).table.deferrable

    def _apply(self, effects: Sequence[Effect]) -> None:
        """Apply effects one after the other; runs of one statement go in one round trip."""
        for sql, run in groupby(map(self._statement, effects), key=itemgetter(0)):
            arguments = [parameters for _, parameters in run]
            if arguments[0] is None:
                for _ in arguments:
                    # Not prepared: without parameters it may be several statements.
                    self._connection.execute(sql, prepare=False)
            elif len(arguments) == 1:
                self._connection.execute(sql, arguments[0])
            else:
                with self._connection.cursor() as cursor:
                    cursor.executemany(sql, arguments)

    def _statement(self, effect: Effect) -> tuple[str, Any]:
        if isinstance(effect, Execute):
            return effect.sql, effect.params
        shape = self._shape(effect)
        return shape.sql, shape.single(effect.row)  # type: ignore[union-attr]

    def _shape(self, effect: Effect) -> Shape:
        if not isinstance(effect, Upsert | Insert | Delete):
            raise TypeError(f"PostgreSQL cannot take the effect {type(effect).__name__}")
        return self._shapes.of(effect)

    # -- savepoints

    def _attempt(self, act: Callable[[], None]) -> Exception | None:
        """Do something in a savepoint: None, or the data error that undid it.

        Everything else is raised, with the transaction left as it is.
        """
        self._connection.execute("savepoint sideline_writer")
        try:
            act()
        except Exception as error:
            timeout = getattr(error, "sqlstate", None) == _STATEMENT_TIMEOUT
            if kind_of(error) != "data" and not timeout:
                raise
            self._connection.execute(_UNDO, prepare=False)
            # Without a timeout of its own, a statement was cancelled by a person.
            if timeout and not self._has_timeout():
                raise
            return error
        self._connection.execute("release savepoint sideline_writer")
        return None

    def _has_timeout(self) -> bool:
        row = self._connection.execute(_TIMEOUT).fetchone()
        return bool(row and row[0])

    # -- at start

    def _check_row(self, effect: Effect) -> None:
        try:
            shape = self._shape(effect)
        except (UnknownNameError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"The pipeline cannot write what it declares: {error}.",
                hint="Correct the effect, or create what it names, and start again.",
            ) from error
        if isinstance(effect, Upsert) and shape.table.unique_on(shape.key) is None:
            raise _no_unique_index(shape)


def _no_unique_index(shape: Shape) -> ConfigurationError:
    columns = [column.name for column in shape.columns if column.name in shape.key]
    names = ", ".join(quote(name) for name in columns)
    return ConfigurationError(
        f"Upserts into table {shape.table.label} go by {', '.join(columns)}, "
        "but no unique index on exactly these columns exists.",
        hint=f"create unique index on {shape.table.sql} ({names});".replace("%%", "%"),
    )


def _runs(events: Sequence[int], size: int) -> list[list[int]]:
    """Cut into runs, the first one last: where a stack's top is."""
    return [list(events[start : start + size]) for start in range(0, len(events), size)][::-1]
