"""Effects of a slice become rows, inside the transaction that the caller opened and fenced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import psycopg

from sideline.classify import kind_of
from sideline.effects import Delete, Effect, Execute, Insert, Upsert
from sideline.errors import ConfigurationError
from sideline.homes.alike import doubtful
from sideline.homes.catalogue import Catalogue, UnknownNameError
from sideline.homes.kinship import behind, events_of, last_of, related, rivals_of, wrote_none_of
from sideline.homes.names import quote
from sideline.homes.orphans import FOREIGN_KEY, orphans
from sideline.homes.planning import plan, plan_rest, plan_usual
from sideline.homes.plans import (
    MOST_SUSPECTS,
    ROWS_PER_STATEMENT,
    Batch,
    Bulk,
    Ordered,
    Plan,
    Step,
    Work,
    batch_of,
)
from sideline.homes.poison import Apart, write_apart
from sideline.homes.refusals import MOST_STATEMENTS, refusals
from sideline.homes.savepoints import Savepoints, is_data, is_data_or_sql, is_timeout, quietly
from sideline.homes.statements import Shape, Shapes, check_sql

__all__ = ["ALL_APPLIED", "Batch", "Work", "Writer", "Written"]

# How often the rest is written anew when new culprits appear.
PASSES = 3
# How many events share a savepoint when they are applied in log order, first and after errors.
RUN_SIZES = (64, 8, 1)
# So many events that will most likely fail are worth a round trip of their own.
FEWEST_ASKED = 3
# Statements of the user's that are known to be understood; more are not worth the memory.
MOST_REMEMBERED = 1_000
_UNDO_SEARCH = "rollback to savepoint sideline_search; release savepoint sideline_search"
_KEEP_SEARCH = "release savepoint sideline_search"
# And back: within the next event a child may come before its parent again.
JUDGE_DEFERRED = "set constraints all immediate; set constraints all deferred"


class Written(NamedTuple):
    """What became of a batch; everything that is not named here was applied."""

    failed: dict[int, BaseException]
    """Index in the batch: its own error. None of its effects stays in any table."""
    followers: frozenset[int]
    """Later events of a failed key: not applied."""


ALL_APPLIED = Written({}, frozenset())


class _Left(NamedTuple):
    """What could not be written together."""

    events: Sequence[int]
    doubted: AbstractSet[int] = frozenset()
    """Those among them that will most likely fail."""


class _Found(NamedTuple):
    """What a search for culprits found."""

    doubted: set[int]
    """Who wrote last what was refused."""
    events: set[int]
    """Everybody who had a part in it, or shares something with those who had."""
    written: bool
    """All others are written already, and of these nothing."""


class Writer:
    """Writes batches on one connection; keeps what it learned about the tables.

    It never commits or rolls back the transaction, only savepoints of its own. Errors that are
    not a row's own (a lost connection, a missing right) are raised as they came.
    """

    def __init__(self, connection: psycopg.Connection[Any], *, fold: bool = True) -> None:
        self._connection = connection
        self._savepoints = Savepoints(connection)
        self._fold = fold
        self._catalogue = Catalogue(connection)
        self._shapes = Shapes(self._catalogue, self._refused_by_checks)
        self._understood: set[str] = set()
        self._refused: tuple[Sequence[Work], Plan, Exception] | None = None
        self._planned: tuple[Sequence[Work], Plan] | None = None
        self._judges_early = False
        """Something that no effect names may wait until COMMIT with its complaint."""

    def write(
        self, works: Sequence[Work], *, hold_followers: bool = True, optimistic: bool = False
    ) -> Written:
        """Apply a batch; an event that fails for a reason of its own fails alone.

        ``optimistic`` saves the savepoint: a data error is then raised, and the caller rolls
        back, opens the transaction anew and asks again without it.
        """
        batch = batch_of(works)
        before, self._refused = self._refused, None
        refused = before is not None and before[0] is works
        made = before[1] if before and refused else self._plan(works)
        if not made.steps and not made.suspects:
            return ALL_APPLIED
        if optimistic and not made.suspects:
            try:
                self._run(made)
            except Exception as error:
                # When the caller comes back with it, it is not tried as a whole again.
                self._refused = works, made, error
                raise
            return ALL_APPLIED
        left = self._write_together(batch, made, before[2] if before and refused else None)
        if not left.events:
            return ALL_APPLIED
        return self._write_alone(batch, left, hold_followers=hold_followers)

    def in_one(self, works: Sequence[Work]) -> tuple[str, dict[str, str]] | None:
        """The one statement that writes a batch behind a fence, and its arguments.

        None: it takes more than one. Without a statement there is nothing to write.
        """
        made = self._plan(works)
        # Whoever comes back with it has no other plan.
        self._planned = works, made
        if not made.steps and not made.suspects:
            return "", {}
        step = made.steps[0] if self._is_short(made) and not made.suspects else None
        if not isinstance(step, Bulk):
            return None
        values = step.shape.arguments(step.columns)
        return step.shape.fenced_sql, {f"c{place}": text for place, text in enumerate(values)}

    def foresee(self, works: Sequence[Work]) -> None:
        """Plan a batch that is to come while the connection is busy: nobody can be asked now."""
        batch = batch_of(works)
        first = batch.effects[0] if batch.effects else ()
        shape = self._shapes.seen(first[0]) if self._fold and first else None
        if shape is None or shape.table.checks:
            return
        made = plan_usual(batch, self._shapes)
        if made is not None:
            self._planned = works, made

    def apply_one(self, effects: Sequence[Effect]) -> None:
        """Apply one event's effects in their order, by plain statements; raises what fails."""
        self._apply(effects)
        if any(map(self._may_wait, effects)):
            self._judge_deferred()

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
        self._planned = None

    def judge_early(self) -> bool:
        """COMMIT refused a row: ask all constraints before it from now on; False: it did before.

        Triggers and partitions lead to tables that no effect names, so nobody knows beforehand
        which constraints are waiting there.
        """
        before, self._judges_early = self._judges_early, True
        return not before

    def _plan(self, works: Sequence[Work]) -> Plan:
        before, self._planned = self._planned, None
        if before is not None and before[0] is works:
            return before[1]
        return plan(batch_of(works), self._shapes, folded=self._fold)

    # -- together

    def _write_together(self, batch: Batch, made: Plan, refused: Exception | None) -> _Left:
        """Write what can be written in bulk; returns what is still to be applied, in log order.

        Whoever comes behind a culprit by a key or a row is held out with it, and the rest is
        written anew, because a folded row may carry the healthy write of another key.
        ``refused``: why it is known already that the whole cannot be written.
        """
        error = refused
        everything = _Left(range(len(batch)))
        held: set[int] = set()
        suspects = made.suspects
        doubted = set(suspects)
        for passed in range(PASSES):
            if made.opaque and (suspects or refused):
                return everything
            made = self._hold(batch, made, suspects, held)
            if not refused or held:
                error = self._savepoints.attempt(
                    lambda made=made: self._run(made),  # type: ignore[misc]
                    quick=self._is_short(made),
                    forgives=is_data_or_sql if made.opaque else is_data,
                )
                if error is None:
                    return _Left(sorted(held), doubted)
                if made.opaque or is_timeout(error):
                    return everything
            suspects, likely = self._doubted(made, error)
            if not passed and made.usual is not None:
                # A row is what the last event says: those before it may be all right.
                suspects = likely
            if not suspects:
                found = self._search(batch, made)
                if found is None:
                    return everything
                if found.written:
                    return _Left(sorted(held | found.events), doubted | found.doubted)
                suspects = found.events
                doubted |= found.doubted
            else:
                doubted |= likely
        return everything

    def _hold(self, batch: Batch, made: Plan, suspects: set[int], held: set[int]) -> Plan:
        """Add the suspects and who is behind them to those held out, and plan without them."""
        while suspects:
            held |= behind(batch, made, suspects)
            made = plan_rest(batch, made, self._shapes, folded=self._fold, without=held)
            suspects = made.suspects
        return made

    def _doubted(self, made: Plan, error: Exception | None) -> tuple[set[int], set[int]]:
        """The few whom nobody vouches for: quicker asked than tried, often right.

        All that had a part in their rows, and those who wrote them last.
        """
        found: set[int] = set()
        last: set[int] = set()
        for step in made.steps:
            if isinstance(step, Bulk):
                places = {*doubtful(step.shape, step.columns)}
                if step.shape.verb != "delete":
                    if step.shape.table.checks and not step.shape.table.unfolded:
                        places.update(self._refused_by_checks(step.shape, step.columns) or ())
                    places.update(self._orphans(step, error))
                if len(places) > MOST_SUSPECTS:
                    return set(), set()
                found |= events_of(step, sorted(places))
                last |= last_of(step, sorted(places))
        return found, last

    def _orphans(self, step: Bulk, error: Exception | None) -> Sequence[int]:
        """Who has no parent, after a foreign key was violated; the parent may be on its way."""
        if not isinstance(error, psycopg.Error) or error.sqlstate != FOREIGN_KEY:
            return ()
        found: list[int] = []
        name = error.diag.constraint_name or ""
        # The parent's table may be one that this role cannot read.
        self._savepoints.attempt(
            lambda: found.extend(orphans(self._connection, step.shape, step.columns, name)),
            forgives=lambda reason: kind_of(reason) != "recoverable",
        )
        return found

    def _search(self, batch: Batch, made: Plan) -> _Found | None:
        """Write step by step what can be written, to find out what cannot; None: in vain."""
        self._connection.execute("savepoint sideline_search")
        found = self._search_steps(batch, made)
        undo = found is None or not found.written
        self._connection.execute(_UNDO_SEARCH if undo else _KEEP_SEARCH, prepare=False)
        return found

    def _search_steps(self, batch: Batch, made: Plan) -> _Found | None:
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
            error = self._savepoints.attempt(lambda number=number, step=step: write(number, step))  # type: ignore[misc]
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
        doubted = [last_of(made.steps[number], places) for number, places in refused.items()]
        return _Found(set().union(*doubted), events, written)

    def _stands(self, made: Plan) -> bool:
        """Whether what was written also passes the constraints that could wait."""
        return not self._defers(made) or self._savepoints.attempt(self._judge_deferred) is None

    def _defers(self, made: Plan) -> bool:
        """Whether a constraint may wait until COMMIT with its complaint."""
        return self._judges_early or made.deferrable

    def _is_short(self, made: Plan) -> bool:
        """Whether one statement does it all."""
        return made.short and not self._defers(made)

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
        if self._defers(made):
            self._judge_deferred()

    def _step(self, step: Step) -> None:
        if isinstance(step, Ordered):
            self._apply([effect for _, effect in step.effects])
            return
        for start in range(0, len(step.ids), ROWS_PER_STATEMENT):
            part = [column[start : start + ROWS_PER_STATEMENT] for column in step.columns]
            self._connection.execute(step.shape.sql, step.shape.arguments(part), prepare=True)

    def _judge_deferred(self) -> None:
        # Not prepared: it is two statements.
        self._connection.execute(JUDGE_DEFERRED, prepare=False)

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

        return None if self._savepoints.attempt(ask) is not None else refused

    # -- in log order

    def _write_alone(self, batch: Batch, left: _Left, *, hold_followers: bool) -> Written:
        """Apply events in log order, as if each had a savepoint across all its tables."""
        failed: dict[int, BaseException] = {}
        failed_keys: set[Hashable] = set()
        self._connection.execute("savepoint sideline_writer")
        followers: set[int] = set()
        # Runs that succeed as a whole need one savepoint; those that do not are cut smaller.
        waiting = [
            run
            for fails, some in groupby(reversed(left.events), key=left.doubted.__contains__)
            for run in _runs(list(some)[::-1], 1 if fails else RUN_SIZES[0])
        ]
        asked: set[int] = set()
        keys = batch.keys
        while waiting:
            if waiting[-1][0] in left.doubted and waiting[-1][0] not in asked:
                ahead = _ahead(waiting, left.doubted, keys if hold_followers else None, failed_keys)
                refused = self._ask(batch, ahead, asked)
                failed |= refused
                if hold_followers:
                    failed_keys.update(keys[event] for event in refused)
                    failed_keys.discard(None)
            run = [event for event in waiting.pop() if event not in failed]
            followers.update(event for event in run if keys[event] in failed_keys)
            run = [event for event in run if event not in followers]
            if not run:
                continue
            error = self._savepoints.attempt_next(
                lambda run=run: self._apply_events(batch, run),  # type: ignore[misc]
                forgives=self._forgiver(batch, run),
            )
            if error is None:
                continue
            if len(run) > 1:
                waiting.extend(_runs(run, next(size for size in RUN_SIZES if size < len(run))))
                continue
            failed[run[0]] = error
            if hold_followers and keys[run[0]] is not None:
                failed_keys.add(keys[run[0]])
        self._connection.execute("release savepoint sideline_writer")
        return Written(failed, frozenset(followers))

    def _ask(
        self, batch: Batch, events: Sequence[int], asked: set[int]
    ) -> dict[int, BaseException]:
        """Why some of those are refused that are next in log order; who was asked is told."""
        statements: list[tuple[str, Sequence[str]]] = []
        for event in events:
            try:
                (effect,) = batch[event].effects
                if self._may_wait(effect):
                    break
                statements.append(self._statement(effect))
            # Several effects, or of no use: it is tried by itself, like others.
            except Exception:  # noqa: BLE001
                break
            if statements[-1][0] != statements[0][0]:
                statements.pop()
                break
        if len(statements) < FEWEST_ASKED:
            return {}
        rows = [row for _, row in statements]
        failed: dict[int, BaseException] = {}
        for event, error in zip(
            events, refusals(self._connection, statements[0][0], rows), strict=False
        ):
            asked.add(event)
            if error is None or not is_data(error):
                # It stands in the way of those behind it.
                break
            failed[event] = error
        return failed

    def _forgiver(self, batch: Batch, run: Sequence[int]) -> Callable[[Exception], bool]:
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
            return is_data_or_sql
        return is_data

    def _apply_events(self, batch: Batch, events: Sequence[int]) -> None:
        effects = [effect for event in events for effect in batch[event].effects]
        self.apply_one(effects)

    def _may_wait(self, effect: Effect) -> bool:
        """Whether a constraint may wait until COMMIT with its complaint about the effect."""
        if self._judges_early or isinstance(effect, Execute):
            return True
        return self._shape(effect).table.deferrable

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
                with self._connection.cursor() as cursor, quietly():
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


def _ahead(
    waiting: Sequence[Sequence[int]],
    doubted: AbstractSet[int],
    keys: Sequence[Hashable | None] | None,
    failed_keys: AbstractSet[Hashable],
) -> list[int]:
    """The doubted events that are next if each of them fails: nobody else comes in between.

    With ``keys``, whoever comes behind one of them does not come in between.
    """
    found: list[int] = []
    spoilt: set[Hashable] = set()
    for run in reversed(waiting):
        follows = keys is not None and all(
            keys[event] in spoilt or keys[event] in failed_keys for event in run
        )
        if follows:
            continue
        if run[0] not in doubted or len(found) == MOST_STATEMENTS:
            break
        found.append(run[0])
        if keys is not None and keys[run[0]] is not None:
            spoilt.add(keys[run[0]])
    return found


def _runs(events: Sequence[int], size: int) -> list[list[int]]:
    """Cut into runs, the first one last: where a stack's top is."""
    return [list(events[start : start + size]) for start in range(0, len(events), size)][::-1]
