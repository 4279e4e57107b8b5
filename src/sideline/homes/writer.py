"""Effects of a slice become rows, inside the transaction that the caller opened and fenced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import psycopg

from sideline.classify import kind_of
from sideline.effects import Delete, Effect, Execute, Insert, Upsert
from sideline.errors import ConfigurationError
from sideline.homes.alike import doubtful
from sideline.homes.catalogue import Catalogue, UnknownNameError
from sideline.homes.kinship import events_of, related, rivals_of, wrote_none_of
from sideline.homes.names import quote
from sideline.homes.planning import plan
from sideline.homes.plans import (
    MOST_SUSPECTS,
    ROWS_PER_STATEMENT,
    Batch,
    Bulk,
    Ordered,
    Plan,
    Step,
    Work,
)
from sideline.homes.poison import Apart, write_apart
from sideline.homes.statements import Shape, Shapes, check_sql

__all__ = ["Batch", "Work", "Writer", "Written"]

# How often the rest is written anew when new culprits appear.
PASSES = 3
# How many events share a savepoint when they are applied in log order, first and after errors.
RUN_SIZES = (64, 8, 1)
# Statements of the user's that are known to be understood; more are not worth the memory.
MOST_REMEMBERED = 1_000
_TIMEOUT = "select current_setting('statement_timeout') <> '0'"
_UNDO_SEARCH = "rollback to savepoint sideline_search; release savepoint sideline_search"
_KEEP_SEARCH = "release savepoint sideline_search"
_UNDO = "rollback to savepoint sideline_writer; release savepoint sideline_writer"


class Written(NamedTuple):
    """What became of a batch; everything that is not named here was applied."""

    failed: dict[int, BaseException]
    """Index in the batch: its own error. None of its effects stays in any table."""
    followers: frozenset[int]
    """Later events of a failed key: not applied."""


_ALL_APPLIED = Written({}, frozenset())


class _Found(NamedTuple):
    """What a search for culprits found."""

    events: set[int]
    """The culprits and everybody who shares something with them."""
    written: bool
    """All others are written already, and of these nothing."""


class Writer:
    """Writes batches on one connection; keeps what it learned about the tables.

    It never commits or rolls back the transaction, only savepoints of its own. Errors that are
    not a row's own (a lost connection, a missing right) are raised as they came.
    """

    def __init__(self, connection: psycopg.Connection[Any], *, fold: bool = True) -> None:
        self._connection = connection
        self._fold = fold
        self._catalogue = Catalogue(connection)
        self._shapes = Shapes(self._catalogue, self._refused_by_checks)
        self._understood: set[str] = set()
        self._refused: Sequence[Work] | None = None

    def write(
        self, batch: Sequence[Work], *, hold_followers: bool = True, optimistic: bool = False
    ) -> Written:
        """Apply a batch; an event that fails for a reason of its own fails alone.

        ``optimistic`` saves the savepoint: a data error is then raised, and the caller rolls
        back, opens the transaction anew and asks again without it.
        """
        made = plan(batch, self._shapes, folded=self._fold)
        if not made.steps and not made.suspects:
            return _ALL_APPLIED
        if optimistic and not made.suspects:
            return self._write_optimistically(batch, made)
        alone = self._write_together(batch, made, refused=batch is self._refused)
        if not alone:
            return _ALL_APPLIED
        return self._write_alone(batch, alone, hold_followers=hold_followers)

    def apply_one(self, effects: Sequence[Effect]) -> None:
        """Apply one event's effects in their order, by plain statements; raises what fails."""
        self._apply(effects)
        if any(map(self._may_wait, effects)):
            self._make_immediate()

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

    def _write_optimistically(self, batch: Sequence[Work], made: Plan) -> Written:
        try:
            self._run(made)
        except Exception:
            # When the caller comes back with it, it is not tried as a whole again.
            self._refused = batch
            raise
        return _ALL_APPLIED

    def _write_together(self, batch: Sequence[Work], made: Plan, *, refused: bool) -> Sequence[int]:
        """Write what can be written in bulk; returns what is still to be applied, in log order.

        Whoever shares a key or a row with a culprit is held out with it, and the rest is
        written anew, because a folded row may carry the healthy write of another key.
        ``refused``: it is known already that the whole cannot be written.
        """
        everything = range(len(batch))
        held: set[int] = set()
        suspects = made.suspects
        for _ in range(PASSES):
            if made.opaque and (suspects or refused):
                return everything
            made = self._hold(batch, made, suspects, held)
            if not refused or held:
                error = self._attempt(
                    lambda made=made: self._run(made),  # type: ignore[misc]
                    quick=made.short,
                    forgives=_is_data_or_sql if made.opaque else _is_data,
                )
                if error is None:
                    return sorted(held)
                if made.opaque or _is_timeout(error):
                    return everything
            suspects = _doubted(made)
            if not suspects:
                found = self._search(batch, made)
                if found is None:
                    return everything
                if found.written:
                    return sorted(held | found.events)
                suspects = found.events
        return everything

    def _hold(self, batch: Sequence[Work], made: Plan, suspects: set[int], held: set[int]) -> Plan:
        """Add the suspects and their kin to those held out, and plan without them."""
        while suspects:
            held |= related(batch, made, suspects)
            made = plan(batch, self._shapes, folded=self._fold, without=held)
            suspects = made.suspects
        return made

    def _search(self, batch: Sequence[Work], made: Plan) -> _Found | None:
        """Write step by step what can be written, to find out what cannot; None: in vain."""
        self._connection.execute("savepoint sideline_search")
        found = self._search_steps(batch, made)
        undo = found is None or not found.written
        self._connection.execute(_UNDO_SEARCH if undo else _KEEP_SEARCH, prepare=False)
        return found

    def _search_steps(self, batch: Sequence[Work], made: Plan) -> _Found | None:
        refused: dict[int, list[int]] = {}
        rivals: set[int] = set()

        def write(number: int, step: Step) -> None:
            if isinstance(step, Ordered):
                self._step(step)
                return
            apart = self._write_apart(step)
            refused[number] = apart.refused
            if apart.conflict:
                rivals.update(rivals_of(made, step, apart.refused))

        for number, step in enumerate(made.steps):
            error = self._attempt(lambda number=number, step=step: write(number, step))  # type: ignore[misc]
            if error is not None:
                return None
        culprits = {
            event
            for number, places in refused.items()
            for event in events_of(made.steps[number], places)
        }
        if not culprits:  # an error that no row has by itself: only log order can tell
            return None
        events = related(batch, made, culprits | rivals)
        written = wrote_none_of(made, refused, events) and self._stands(made)
        return _Found(events, written)

    def _stands(self, made: Plan) -> bool:
        """Whether what was written also passes the constraints that could wait."""
        return not made.deferrable or self._attempt(self._make_immediate) is None

    def _write_apart(self, step: Bulk) -> Apart:
        refused: list[int] = []
        conflict = False
        for start in range(0, len(step.ids), ROWS_PER_STATEMENT):
            part = [column[start : start + ROWS_PER_STATEMENT] for column in step.columns]
            apart = write_apart(self._connection, step.shape, part)
            refused.extend(start + place for place in apart.refused)
            conflict = conflict or apart.conflict
        return Apart(refused, conflict)

    def _run(self, made: Plan) -> None:
        for step in made.steps:
            self._step(step)
        if made.deferrable:
            self._make_immediate()

    def _step(self, step: Step) -> None:
        if isinstance(step, Ordered):
            self._apply([effect for _, effect in step.effects])
            return
        for start in range(0, len(step.ids), ROWS_PER_STATEMENT):
            part = [column[start : start + ROWS_PER_STATEMENT] for column in step.columns]
            self._connection.execute(step.shape.sql, step.shape.arguments(part), prepare=True)

    def _make_immediate(self) -> None:
        self._connection.execute("set constraints all immediate")

    def _refused_by_checks(self, shape: Shape, columns: list[list[Any]]) -> Sequence[int] | None:
        """Which rows a CHECK of the table refuses; None: it cannot be asked, or fails itself."""
        sql = check_sql(shape)
        if sql is None:
            return None
        refused: list[int] = []

        def ask() -> None:
            for start in range(0, len(columns[0]), ROWS_PER_STATEMENT):
                part = [column[start : start + ROWS_PER_STATEMENT] for column in columns]
                arguments = [*shape.arguments(part), len(part[0]) - 1]
                row = self._connection.execute(sql, arguments, prepare=True).fetchone()
                refused.extend(start + place for place in (row[0] if row else ()))

        return None if self._attempt(ask) is not None else refused

    # -- in log order

    def _write_alone(
        self, batch: Sequence[Work], events: Sequence[int], *, hold_followers: bool
    ) -> Written:
        """Apply events in log order, as if each had a savepoint across all its tables."""
        failed: dict[int, BaseException] = {}
        failed_keys: set[Hashable] = set()
        followers: set[int] = set()
        # Runs that succeed as a whole need one savepoint; those that do not are cut smaller.
        # Few events are those that were found out: most of them fail.
        waiting = _runs(events, 1 if len(events) <= MOST_SUSPECTS else RUN_SIZES[0])
        while waiting:
            run = waiting.pop()
            followers.update(event for event in run if batch[event].key in failed_keys)
            run = [event for event in run if event not in followers]
            error = self._attempt(
                lambda run=run: self._apply_events(batch, run),  # type: ignore[misc]
                forgives=self._forgiver(batch, run),
            )
            if error is None:
                continue
            if len(run) > 1:
                waiting.extend(_runs(run, next(size for size in RUN_SIZES if size < len(run))))
                continue
            failed[run[0]] = error
            if hold_followers and batch[run[0]].key is not None:
                failed_keys.add(batch[run[0]].key)
        return Written(failed, frozenset(followers))

    def _forgiver(self, batch: Sequence[Work], run: Sequence[int]) -> Callable[[Exception], bool]:
        """Whose mistake SQL is that PostgreSQL does not understand.

        The deployment's, as a rule. The event's own if the same statement was understood
        before; a run that has SQL of the user's in it is cut smaller to find out.
        """
        statements = {
            effect.sql
            for event in run
            for effect in batch[event].effects
            if isinstance(effect, Execute)
        }
        if statements and (len(run) > 1 or statements <= self._understood):
            return _is_data_or_sql
        return _is_data

    def _apply_events(self, batch: Sequence[Work], events: Sequence[int]) -> None:
        effects = [effect for event in events for effect in batch[event].effects]
        self.apply_one(effects)

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
                with self._connection.cursor() as cursor, _quietly():
                    cursor.executemany(sql, arguments)
            self._remember(sql)

    def _remember(self, sql: str) -> None:
        if len(self._understood) < MOST_REMEMBERED:
            self._understood.add(sql)

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

    def _attempt(
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
            if not (forgives or _is_data)(error) and not _is_timeout(error):
                raise
            self._connection.execute(_UNDO, prepare=False)
            # Without a timeout of its own, a statement was cancelled by a person.
            if _is_timeout(error) and not self._has_timeout():
                raise
            return error
        return None

    @contextmanager
    def _in_one_round_trip(self) -> Iterator[None]:
        with _quietly(), self._connection.pipeline():
            yield

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


class _Aborted(logging.Filter):
    """Not what psycopg says about the statements behind one that failed: that one is raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("error ignored terminating")


_ABORTED = _Aborted()


@contextmanager
def _quietly() -> Iterator[None]:
    logger = logging.getLogger("psycopg")
    logger.addFilter(_ABORTED)
    try:
        yield
    finally:
        logger.removeFilter(_ABORTED)


def _is_data(error: Exception) -> bool:
    return kind_of(error) == "data"


def _is_data_or_sql(error: Exception) -> bool:
    return _is_data(error) or str(getattr(error, "sqlstate", "")).startswith("42")


def _is_timeout(error: Exception) -> bool:
    return getattr(error, "sqlstate", None) == "57014"


def _doubted(made: Plan) -> set[int]:
    """The few whom the judge does not vouch for: quicker asked than the server, often right."""
    found: set[int] = set()
    for step in made.steps:
        if isinstance(step, Bulk):
            places = doubtful(step.shape, step.columns)
            if len(places) > MOST_SUSPECTS:
                return set()
            found |= events_of(step, places)
    return found


def _runs(events: Sequence[int], size: int) -> list[list[int]]:
    """Cut into runs, the first one last: where a stack's top is."""
    return [list(events[start : start + size]) for start in range(0, len(events), size)][::-1]
