"""Releases, discards and restores, as people plan them, start them and steer them (R1, R4, R6).

Only rows are written here: what is wanted, the frozen set, and who wanted it. The owners of the
partitions carry it out. Nothing is printed, so that any front end can use it.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from sideline.errors import NotFoundError, RefusedError, UsageError
from sideline.ledger import audit
from sideline.ledger.chosen import Chosen, unknown_pipeline
from sideline.ledger.connection import Connection
from sideline.ledger.place import describe_pipeline, is_held
from sideline.ledger.reading import schema_of, waiting
from sideline.ledger.sql import queries
from sideline.ledger.store import channel
from sideline.selections import Plan, PlanName, Selection, Step, steps
from sideline.views import Dealing, Recorded

LOCK_TIMEOUT = "15s"
MOST_OPERATIONS_SHOWN = 20

OPEN = frozenset({"running", "paused", "stopped"})


# Planning


def plan(
    connection: Connection,
    selection: Selection,
    *,
    name: PlanName | None = None,
    version: str | None = None,
) -> Plan:
    """What the selection holds now; ``name``: as of the moment when that plan was made.

    ``version`` is the handler's that would get the events, where somebody knows it better than
    the ledger. The transaction stays open: everything is seen at one moment.
    """
    chosen = Chosen(connection, selection)
    boundary = chosen.now if name is None else name.boundary
    figures = chosen.figures(boundary)
    row = describe_pipeline(connection, selection.pipeline)
    assert row is not None  # noqa: S101 - the choice was made among those that exist
    causes = chosen.causes(figures.causes)
    return Plan(
        selection=selection,
        name=PlanName(boundary, figures.digest(selection)),
        items=figures.items,
        keys=figures.keys,
        alone=figures.alone,
        events=figures.events,
        failed=figures.failed,
        oldest=figures.oldest,
        causes=causes,
        versions=figures.versions,
        version=version or row["handler_version"],
        running=is_held(connection, selection.pipeline),
        paused=row["paused"],
        sample=chosen.sample(boundary),
        new=0 if name is None else chosen.since(boundary),
        late=chosen.late(),
        apart=chosen.apart(),
    )


def execute(  # noqa: PLR0913 - what an operation consists of
    connection: Connection,
    shown: Plan,
    *,
    actor: str,
    reason: str | None = None,
    rate: float | None = None,
    stop_at: float = 0.5,
    ramp: bool = False,
    wanted: PlanName | None = None,
) -> list[int]:
    """Freeze what a plan showed, in the same transaction; the operations' numbers.

    ``wanted``: refused unless the set is the one of that plan. With ``ramp`` there are several
    operations: the first one runs, the others are paused until somebody lets them go on.
    """
    selection = shown.selection
    if wanted is not None and wanted.digest != shown.name.digest:
        raise _stale(shown)
    if not shown.items:
        return []
    chosen = Chosen(connection, selection)
    made = steps(shown.items, ramp=ramp)
    try:
        _refuse_repeated(connection, shown)
        numbers = [
            _add(
                connection,
                shown,
                one,
                chosen,
                actor=actor,
                reason=reason,
                rate=rate,
                stop_at=stop_at,
                of=(place, len(made)),
            )
            for place, one in enumerate(made, 1)
        ]
        frozen = chosen.freeze(shown.name.boundary, numbers, made)
    except psycopg.errors.UniqueViolation as error:
        connection.rollback()
        message = f"somebody else carries out plan {shown.name} already."
        raise RefusedError(message, hint="See it: sideline ops list") from error
    except psycopg.errors.ForeignKeyViolation as error:
        connection.rollback()
        raise unknown_pipeline(selection.pipeline) from error
    if frozen != shown.items:
        connection.rollback()
        raise _stale(shown)
    if selection.kind != "release":
        _settle_homeless(connection, selection, numbers)
    audit.record(
        connection,
        selection.kind,
        actor=actor,
        pipeline=selection.pipeline,
        subject={
            "operations": numbers,
            "plan": str(shown.name),
            "selection": selection.as_json(),
            "keys": shown.keys + shown.alone,
        },
        count=shown.events,
        reason=reason,
    )
    connection.execute(queries()["announce_release"], {"channel": channel(selection.pipeline)})
    connection.commit()
    return numbers


def _settle_homeless(connection: Connection, selection: Selection, numbers: list[int]) -> None:
    """Do at once what no owner of a partition could do."""
    named = {
        "pipeline": selection.pipeline,
        "operations": numbers,
        "restore": selection.kind == "restore",
    }
    row = connection.execute(queries()["settle_homeless"], named).fetchone()
    if row is not None and row[0]:
        connection.execute(queries()["finish_operations"], named)


def choose_pipeline(connection: Connection, name: str | None, kind: str) -> str:
    """The pipeline that is meant: the one named, or the only one there is anything of."""
    known = waiting(connection, name)
    if name is not None:
        return name
    busy = [one for one, (parked, _) in known.items() if parked]
    if kind != "restore" and len(busy) == 1:
        return busy[0]
    if len(known) == 1:
        return next(iter(known))
    if not known:
        message = "no pipeline has run with this database yet."
        raise NotFoundError(message, hint="`sideline status` lists those there are.")
    message = f"there are {len(known)} pipelines: {', '.join(known)}."
    raise UsageError(message, hint=f"Name one: sideline {kind} {next(iter(known))} ...")


def trial_rows(connection: Connection, shown: Plan, *, most: int) -> list[tuple[Any, ...]]:
    """The events of a plan with their bytes, key after key in the order of replay."""
    return Chosen(connection, shown.selection).events(shown.name.boundary, most)


def _add(  # noqa: PLR0913 - what an operation consists of
    connection: Connection,
    shown: Plan,
    step: Step,
    chosen: Chosen,
    *,
    actor: str,
    reason: str | None,
    rate: float | None,
    stop_at: float,
    of: tuple[int, int],
) -> int:
    place, count = of
    items, failed, events = step.last - step.first + 1, shown.failed, shown.events
    if count > 1:
        failed, events = chosen.between(shown.name.boundary, step)
    named = {
        "pipeline": shown.selection.pipeline,
        "kind": shown.selection.kind,
        "state": "running" if place == 1 else "paused",
        "selection": Jsonb(
            shown.selection.as_json()
            | {"waiting": events}
            | ({"step": place, "of": count} if count > 1 else {})
        ),
        "reason": reason,
        "actor": actor,
        "items": items,
        "events": failed,
        "plan": str(shown.name) if place == 1 else f"{shown.name}/{place}",
        "rate": rate,
        "stop_at": stop_at,
        "note": None if place == 1 else f"step {place} of {count}: begins after the one before",
    }
    row = connection.execute(queries()["add_operation"], named).fetchone()
    assert row is not None  # noqa: S101 - an insert returns its row
    return int(row[0])


def _refuse_repeated(connection: Connection, shown: Plan) -> None:
    found = _carried_out(connection, shown.selection.pipeline, str(shown.name))
    if found is not None:
        raise found


def _carried_out(
    connection: Connection, pipeline: str, plan: str, *, but: int | None = None
) -> RefusedError | None:
    """The refusal of a plan that an operation, another than ``but``, carries out already."""
    named = {"pipeline": pipeline, "plan": plan, "but": but}
    row = connection.execute(queries()["operations_like"], named).fetchone()
    if row is None:
        return None
    message = f"operation {row[0]} carries out plan {plan} already; it is {row[1]}."
    return RefusedError(message, hint=f"See it: sideline ops show {row[0]}")


def _stale(shown: Plan) -> RefusedError:
    kind = shown.selection.kind
    message = (
        f"what there is to {kind} has changed since that plan was made: some of it is done, "
        "failed again or was given up."
    )
    hint = f"Nothing was changed. Look again: {shown.selection.command()}"
    return RefusedError(message, hint=hint)


# Steering


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """A release, a discard or a restore, and how far it is."""

    id: int
    pipeline: str
    kind: str
    state: str
    selection: dict[str, Any]
    reason: str | None
    actor: str
    items: int
    events: int
    """Failed events that were frozen."""
    plan: str
    rate: float | None
    stop_at: float
    note: str | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    applied: int
    failed: int
    discarded: int
    restored: int

    @property
    def total(self) -> int:
        """Events that waited in it when it began."""
        return max(int(self.selection.get("waiting", self.events)), self.done)

    @property
    def done(self) -> int:
        """Events that it has moved or tried."""
        return self.applied + self.failed + self.discarded + self.restored

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.state != "running"


class Items(NamedTuple):
    """What has become of the frozen set."""

    waiting: int = 0
    done: int = 0
    failed: int = 0
    gone: int = 0


def page(
    connection: Connection,
    *,
    pipeline: str | None = None,
    only_open: bool = False,
    limit: int,
    after: int | None = None,
) -> list[Operation]:
    """Operations, the newest first."""
    if not schema_of(connection):
        return []
    return _operations(
        connection, pipeline=pipeline, open=only_open, limit=limit, after=after, id=None
    )


def find(connection: Connection, number: int) -> Operation:
    """One operation."""
    found = []
    if schema_of(connection):
        found = _operations(connection, pipeline=None, open=False, limit=1, after=None, id=number)
    if not found:
        message = f"there is no operation {number}."
        raise NotFoundError(message, hint="`sideline ops list` lists those there are.")
    return found[0]


def items(connection: Connection, number: int) -> Items:
    """What has become of an operation's items; counts them."""
    rows = connection.execute(queries()["items_by_state"], {"operation": number}).fetchall()
    return Items(**dict(rows))


def pause(connection: Connection, number: int, *, actor: str, reason: str | None) -> Operation:
    """Begin nothing more of it until it is resumed."""
    return _change(
        connection, number, "ops pause", {"running"}, "paused", actor=actor, reason=reason
    )


def resume(connection: Connection, number: int, *, actor: str, reason: str | None) -> Operation:
    """Let it go on: paused by a person, or stopped because too much failed again."""
    return _change(
        connection,
        number,
        "ops resume",
        {"paused", "stopped"},
        "running",
        actor=actor,
        reason=reason,
    )


def cancel(connection: Connection, number: int, *, actor: str, reason: str | None) -> Operation:
    """Begin nothing more of it, for good; what is done stays done."""
    return _change(connection, number, "ops cancel", OPEN, "cancelled", actor=actor, reason=reason)


def history(connection: Connection, event: Recorded) -> list[Dealing]:
    """The operations that an event was in, as far as they are known; the newest first."""
    cursor = connection.cursor(row_factory=class_row(Dealing))
    named = {
        "pipeline": event.pipeline,
        "topic": event.topic,
        "partition": event.partition,
        "offset": event.offset,
        "incarnation": event.incarnation,
        "limit": MOST_OPERATIONS_SHOWN,
    }
    return cursor.execute(queries()["operations_of_event"], named).fetchall()


def _operations(connection: Connection, **named: Any) -> list[Operation]:  # noqa: ANN401
    cursor = connection.cursor(row_factory=class_row(Operation))
    return cursor.execute(queries()["operations"], named).fetchall()


def _change(  # noqa: PLR0913 - a change, by whom and why
    connection: Connection,
    number: int,
    action: str,
    allowed: frozenset[str] | set[str],
    state: str,
    *,
    actor: str,
    reason: str | None,
) -> Operation:
    before = find(connection, number)
    connection.rollback()
    try:
        connection.execute("select set_config('lock_timeout', %s, true)", (LOCK_TIMEOUT,))
        row = connection.execute(queries()["lock_operation"], {"operation": number}).fetchone()
    except psycopg.errors.LockNotAvailable as error:
        connection.rollback()
        message = f"a worker holds operation {number} longer than {LOCK_TIMEOUT}."
        raise RefusedError(message, hint="Nothing was changed; try again in a minute.") from error
    if row is None:
        raise NotFoundError(f"there is no operation {number}.")
    _, _, now = row
    if now == state:
        # Twice is harmless.
        connection.rollback()
        return find(connection, number)
    if now not in allowed:
        connection.rollback()
        message = f"operation {number} is {now}."
        raise RefusedError(message, hint=f"See it: sideline ops show {number}")
    named = {"operation": number, "state": state, "note": _note(actor, reason, state)}
    try:
        connection.execute(queries()["change_operation"], named)
    except psycopg.errors.UniqueViolation as error:
        connection.rollback()
        other = _carried_out(connection, before.pipeline, before.plan, but=number)
        message = f"another operation carried out plan {before.plan} just now."
        raise other or RefusedError(message, hint="Try again.") from error
    audit.record(
        connection,
        action,
        actor=actor,
        pipeline=before.pipeline,
        subject={"operation": number, "kind": before.kind, "was": now},
        reason=reason,
    )
    connection.execute(queries()["announce_release"], {"channel": channel(before.pipeline)})
    found = find(connection, number)
    connection.commit()
    return found


def _note(actor: str, reason: str | None, state: str) -> str | None:
    if state == "running":
        return None
    return f"{state} by {actor}" + (f": {reason}" if reason else "")
