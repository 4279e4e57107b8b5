"""The fence, in words that the engine speaks: take, advance, settle, release."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline.engine.lease import Partition
from sideline.errors import FencedError
from sideline.ledger.outbox import Ready
from sideline.ledger.sql import queries

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.ledger.connection import Connection
    from sideline.slices import Outcome


class Stale(Exception):  # noqa: N818 - a fact, not an error
    """What a slice believed about keys aside is no longer so: it is admitted anew."""


class Claim(NamedTuple):
    """Who takes: the lease's number, and an owner that is new for each attempt of a task."""

    pipeline: str
    lease: tuple[int, ...]
    owner: uuid.UUID
    worker: uuid.UUID


@dataclasses.dataclass(slots=True)
class Held:
    """A partition that a lease owns, and where its progress stands."""

    partition: Partition
    next_offset: int
    ctid: str
    attempts: int = 0
    wait_seconds: float = 0.0
    """How long it still has to be left alone, when it is taken in the middle of a backoff."""
    stuck_at: int | None = None
    """The event that it waits for."""
    park_at: int | None = None
    """The event that a person wants set aside."""
    park_reason: str | None = None
    aside: int = 0
    """How many queues have their home here."""
    aside_version: int = 0
    shared: bool = False
    """Keys of its topic may live in other partitions too."""
    incarnation: int = 0
    """How often its topic was made again."""
    guard: list[int] | None = None
    """What the flood guard remembers."""
    outbox_last: int = 0
    """The number of the last record that was written to its outbox."""
    outbox_sent: int = 0
    """The number of the last one that Kafka has acknowledged."""
    tries: dict[str, int] | None = None
    """How often events from here on have failed in place, by offset."""
    slice_number: int = 0
    """Of the last slice that was begun, where effects are records of Kafka."""
    applied_number: int = 0
    """Of the last one that was applied."""
    pending: str | None = None
    """What the last slice changes, while it is neither applied nor dropped; see `pending`."""
    mark: str = ""
    """Which ledger its numbers belong to."""
    mine: bool = False
    """Whether this process held it before, and nobody in between."""
    outbox_next: int = 0
    """The same as ``outbox_last``, once the open transaction is committed."""
    ready: Ready = dataclasses.field(default_factory=Ready)
    """Records that need not be read to be sent."""

    @property
    def unsent(self) -> int:
        """How many records wait to be sent."""
        return self.outbox_last - self.outbox_sent

    def tries_of(self, offset: int) -> int:
        """How often an event has failed in place."""
        return self.tries.get(str(offset), 0) if self.tries else 0


class Move(NamedTuple):
    """How a slice changes its partition's progress row."""

    start: int
    end: int
    consumed: int = 0
    applied: int = 0
    filtered: int = 0
    skipped: int = 0
    unknown: int = 0
    event_ms: int = -1
    parked: int = 0
    aside: int = 0
    """Queues that begin with it."""
    guard: list[int] | None = None
    """What the flood guard remembers from here on; None: what it did."""
    retrying: int = 0
    dead: int = 0
    discarded: int = 0
    copies: int = 0
    """Records of a retry topic; their events are counted elsewhere."""
    duplicate: int = 0

    @property
    def plain(self) -> bool:
        """Whether everything in it went well."""
        failed = self.skipped or self.unknown or self.parked or self.aside
        moved = self.retrying or self.dead or self.discarded or self.copies or self.duplicate
        return not (failed or moved) and self.guard is None

    @classmethod
    def forward(cls, held: Held, counts: Outcome) -> Move:
        """Past what was done."""
        return cls(
            held.next_offset,
            counts.end,
            counts.consumed,
            counts.applied,
            counts.filtered,
            counts.skipped,
            event_ms=counts.event_ms,
            parked=counts.parked,
            aside=counts.aside,
            guard=counts.guard,
            retrying=counts.retrying,
            dead=counts.dead,
            copies=counts.copies,
            duplicate=counts.duplicate,
        )

    @classmethod
    def stay(cls, held: Held, _counts: Outcome | None = None) -> Move:
        """Nowhere: a check of the fence."""
        return cls(held.next_offset, held.next_offset)

    @classmethod
    def unsure(cls, held: Held, events: Sequence[Event], end: int) -> Move:
        """Past events of which nobody knows yet what became of them."""
        last_ms = events[-1].timestamp_ms if events else -1
        count = len(events)
        return cls(held.next_offset, end, count, unknown=count, event_ms=last_ms)

    @classmethod
    def sure(cls, held: Held, counts: Outcome) -> Move:
        """Nowhere, but now it is known what became of them."""
        at = held.next_offset
        return cls(
            at,
            at,
            0,
            counts.applied,
            counts.filtered,
            counts.skipped,
            -counts.consumed,
            parked=counts.parked,
            aside=counts.aside,
            duplicate=counts.duplicate,
        )


class Parting(NamedTuple):
    """In what condition a lease gives a partition back."""

    partition: Partition
    retry_in_seconds: float | None = None
    attempts: int = 0
    trouble: str | None = None
    stuck_at: int | None = None
    tries: dict[str, int] | None = None


class Ledger:
    """The rows of one pipeline, through one connection."""

    def __init__(self, connection: Connection, claim: Claim, *, grace_seconds: float) -> None:
        self._connection = connection
        self._claim = claim
        self._grace = timedelta(seconds=grace_seconds)
        # As text: quicker than an array that is made anew for every slice.
        self._lease_text = f"{{{','.join(map(str, claim.lease))}}}"
        self._started = _backend_start(connection)

    def guesses(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Where partitions stand now: a hint for prefetching."""
        rows = self._connection.execute(queries()["guess"], self._named(partitions)).fetchall()
        self._connection.commit()
        return {Partition(topic, number): offset for topic, number, offset in rows}

    def take(self, partitions: Iterable[Partition], *, replace_dead: bool = True) -> list[Held]:
        """Own what is free of these partitions."""
        parameters = self._named(partitions) | {
            "replace_dead": replace_dead,
            "grace": self._grace,
            "worker": self._claim.worker,
            "backend_start": self._started,
        }
        rows = self._connection.execute(queries()["take"], parameters).fetchall()
        self._connection.commit()
        return [Held(Partition(topic, number), *rest) for topic, number, *rest in rows]

    def not_mine(self, partitions: Iterable[Partition]) -> list[Partition]:
        """Those of these partitions that a higher lease holds already."""
        rows = self._connection.execute(queries()["not_mine"], self._named(partitions)).fetchall()
        self._connection.commit()
        return [Partition(*row) for row in rows]

    def end_frozen(self, partitions: Iterable[Partition]) -> list[int]:
        """End the sessions of owners that froze inside a transaction; their backend ids."""
        parameters = self._named(partitions) | {"grace": self._grace}
        rows = self._connection.execute(queries()["frozen_holders"], parameters).fetchall()
        for (pid,) in rows:
            self._connection.execute(queries()["terminate"], {"pid": pid, "timeout_ms": 5_000})
        self._connection.commit()
        return [pid for (pid,) in rows]

    def advance(self, held: Held, move: Move) -> str:
        """Open a slice's transaction: lock and move the progress row, or find out that it is lost.

        Returns the row's new place; it holds once the transaction is committed.
        """
        parameters = {
            "pipeline": self._claim.pipeline,
            "topic": held.partition.topic,
            "partition": held.partition.number,
            "lease": list(self._claim.lease),
            "owner": self._claim.owner,
            "ctid": held.ctid,
            "start": move.start,
            "end": move.end,
            "consumed": move.consumed,
            "applied": move.applied,
            "filtered": move.filtered,
            "skipped": move.skipped,
            "unknown": move.unknown,
            "parked": move.parked,
            "retrying": move.retrying,
            "dead": move.dead,
            "discarded": move.discarded,
            "duplicate": move.duplicate,
            "copies": move.copies,
            "aside": move.aside,
            "guard": move.guard,
            "event_at": moment(move.event_ms),
        }
        execute = self._connection.execute
        row = execute(queries()["fence_at"], parameters, prepare=True).fetchone()
        if row is None:
            row = execute(queries()["fence"], parameters, prepare=True).fetchone()
        if row is None:
            self._connection.rollback()
            message = f"partition {held.partition} has another owner now."
            raise FencedError(message)
        if row[1] and not held.shared:
            # The topic grew since the take: what was admitted was asked of this partition alone.
            self._connection.rollback()
            held.shared = True
            raise Stale
        return str(row[0])

    def advance_at_once(
        self,
        held: Held,
        move: Move,
        sql: str,
        arguments: Mapping[str, str],
        ids: Mapping[str, Any] | None = None,
    ) -> str | None:
        """A whole slice in one statement: the fence, and what is written behind it.

        ``ids``: the message ids that it stores; one that is there already refuses all of it.
        Outside of a transaction. None: the row has moved or is not ours; nothing is written.
        """
        parameters = {
            "pipeline": self._claim.pipeline,
            "topic": held.partition.topic,
            "partition": held.partition.number,
            "lease": self._lease_text,
            "owner": self._claim.owner,
            "ctid": held.ctid,
            "start": move.start,
            "end": move.end,
            "consumed": move.consumed,
            "applied": move.applied,
            "filtered": move.filtered,
            "event_at": moment(move.event_ms),
            **arguments,
            **(ids or {}),
        }
        fence = queries()["fence_at_once"]
        written = f",\nwritten as (\n{sql}\n)" if sql else ""
        if ids is not None:
            written = f",\nclaimed as (\n{queries()['store_ids_at_once']}\n){written}"
        query = f"with fence as (\n{fence}\n){written}\nselect place from fence"
        row = self._connection.execute(query, parameters, prepare=True).fetchone()
        return None if row is None else str(row[0])

    def settle(self, held: Held) -> int:
        """After a lost connection: where the progress row really stands, while it is ours (K5)."""
        parameters = {
            "pipeline": self._claim.pipeline,
            "topic": held.partition.topic,
            "partition": held.partition.number,
            "lease": list(self._claim.lease),
            "owner": self._claim.owner,
        }
        row = self._connection.execute(queries()["outcome"], parameters).fetchone()
        self._connection.commit()
        if row is None or not row[2]:
            message = f"partition {held.partition} has another owner now."
            raise FencedError(message)
        held.ctid = row[3]
        held.aside, held.aside_version, held.guard = row[4], row[5], row[6]
        held.outbox_last, held.outbox_sent = row[7], row[8]
        held.slice_number, held.applied_number, held.pending = row[9:12]
        return int(row[0])

    def note_tries(self, held: Held, trouble: str | None, wait_seconds: float) -> None:
        """Write down how often an event has failed in place: a crash must not begin anew.

        People see what the partition waits for, and may want it set aside.
        """
        parameters = {
            "pipeline": self._claim.pipeline,
            "topic": held.partition.topic,
            "partition": held.partition.number,
            "lease": list(self._claim.lease),
            "owner": self._claim.owner,
            "attempts": held.attempts,
            "trouble": trouble,
            "stuck_at": held.stuck_at,
            "tries": json.dumps(held.tries) if held.tries else None,
            "due_at": datetime.now(UTC) + timedelta(seconds=wait_seconds),
        }
        row = self._connection.execute(queries()["note_tries"], parameters).fetchone()
        self._connection.commit()
        if row is None:
            message = f"partition {held.partition} has another owner now."
            raise FencedError(message)
        held.ctid, held.park_at, held.park_reason = row

    def reannounce(self) -> None:
        """Tell the next taker that the owner lives on under a new connection."""
        parameters = {
            "pipeline": self._claim.pipeline,
            "lease": list(self._claim.lease),
            "owner": self._claim.owner,
            "backend_start": self._started,
        }
        self._connection.execute(queries()["reannounce"], parameters)
        self._connection.commit()

    def release(self, partings: Sequence[Parting]) -> None:
        """Give partitions back and wake their successor: the last act of a lease."""
        if not partings:
            return
        now = datetime.now(UTC)
        parameters = self._named(parting.partition for parting in partings) | {
            "due_at": [
                None
                if parting.retry_in_seconds is None
                else now + timedelta(seconds=parting.retry_in_seconds)
                for parting in partings
            ],
            "attempts": [parting.attempts for parting in partings],
            "trouble": [parting.trouble for parting in partings],
            "stuck_at": [parting.stuck_at for parting in partings],
            "tries": [json.dumps(part.tries) if part.tries else None for part in partings],
        }
        self._connection.execute(queries()["release"], parameters)
        self._connection.execute(
            queries()["announce_release"], {"channel": channel(self._claim.pipeline)}
        )
        self._connection.commit()

    def _named(self, partitions: Iterable[Partition]) -> dict[str, Any]:
        wanted = list(partitions)
        return {
            "pipeline": self._claim.pipeline,
            "lease": list(self._claim.lease),
            "owner": self._claim.owner,
            "topics": [partition.topic for partition in wanted],
            "partitions": [partition.number for partition in wanted],
        }


def channel(pipeline: str) -> str:
    """The channel on which releases of a pipeline's partitions are announced."""
    # Channel names end at 63 bytes, pipelines' at 100; a clash only costs a look.
    return f"sideline_{uuid.uuid5(uuid.NAMESPACE_OID, pipeline).hex}"


def moment(milliseconds: int) -> datetime | None:
    """A record's time, if it is one."""
    if milliseconds < 0:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    # Producers may say any number.
    except (OverflowError, OSError, ValueError):
        return None


def _backend_start(connection: Connection) -> datetime | None:
    row = connection.execute(
        "select backend_start from pg_stat_activity where pid = pg_backend_pid()"
    ).fetchone()
    connection.rollback()
    return row[0] if row else None
