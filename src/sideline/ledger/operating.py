"""What every slice of an operation does in its transaction, whatever the operation is.

Every change happens behind a fence by lease and owner, and only to rows that are still as they
were read; otherwise nothing is written, and they are read anew (`Stale`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline import arrays
from sideline.crashpoints import reach
from sideline.errors import FencedError
from sideline.ledger.parking import Key, Parking
from sideline.ledger.sql import queries
from sideline.ledger.store import Stale
from sideline.replays import LEAST_TRIED, Item

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.ledger.store import Claim, Held
    from sideline.slices import Aside

# Items are numbered from 0 on at the least.
NONE_SEEN = -1
COUNTS = ("applied", "filtered", "parked", "dead", "discarded", "duplicate", "rejoined")


class Done(NamedTuple):
    """What a slice of an operation came to."""

    applied: int = 0
    failed: int = 0
    discarded: int = 0
    restored: int = 0
    rejoined: Sequence[Key] = ()
    stopped: bool = False


class Counts(dict[int, Counter[str]]):
    """What became of how many events, by the partition that they came from."""

    def __missing__(self, partition: int) -> Counter[str]:
        self[partition] = Counter()
        return self[partition]


class Operating:
    """The slices of operations, through the connection of one lease."""

    def __init__(self, connection: Connection, claim: Claim, parking: Parking) -> None:
        self._connection = connection
        self._claim = claim
        self._parking = parking
        self._ctid = ""

    def begin(self, held: Held, partitions: Iterable[int], queues: Iterable[int]) -> None:
        """Lock what a slice changes, in one order (K16), or find out that it is not ours."""
        wanted = {held.partition.number, *partitions}
        held.outbox_next = held.outbox_last
        held.ready.forget()
        names = self._names(held) | {
            "lease": list(self._claim.lease),
            "owner": self._claim.owner,
            "partitions": sorted(wanted),
        }
        rows = self._connection.execute(queries()["fence_replay"], names).fetchall()
        mine = next((row for row in rows if row[0] == held.partition.number), None)
        if mine is None or not mine[1]:
            self._connection.rollback()
            message = f"partition {held.partition} has another owner now."
            raise FencedError(message)
        if mine[2] and not held.shared:
            # The topic grew since the take: slices of other partitions look at these keys too.
            self._connection.rollback()
            held.shared = True
            raise Stale
        if held.shared:
            # Together with live slices of other partitions: nobody steps aside meanwhile (K13).
            # Who rejoins needs no word to them: whoever still believes a key aside finds its
            # queue gone, and asks anew.
            self._connection.execute(queries()["hold_topic"], names)
            # Otherwise nobody but the owner of their home touches them, and that is fenced.
            self.lock(queues)

    def lock(self, queues: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Queues that are there, with how many wait in them and what they have passed."""
        wanted = sorted(set(queues))
        if not wanted:
            return {}
        names = {"queues": arrays.numbers(wanted)}
        rows = self._connection.execute(queries()["lock_queues"], names).fetchall()
        return {queue: (events, passed) for queue, events, passed in rows}

    def mark(self, operation: int, states: Mapping[int, str]) -> None:
        """Say what became of items."""
        if states:
            names = {
                "operation": operation,
                "numbers": arrays.numbers(list(states)),
                "states": arrays.texts(list(states.values())),
            }
            self._connection.execute(queries()["mark_items"], names)

    def commit(self, held: Held, done: Done, aside: Aside | None) -> None:
        """Make it so; what this process knows of keys aside learns of those that rejoined."""
        reach("replay-before-commit")
        self._connection.commit()
        reach("replay-after-commit")
        held.outbox_last = max(held.outbox_last, held.outbox_next)
        held.ready.commit()
        known = aside is not None and not held.shared and aside.version == held.aside_version
        held.ctid, held.aside = self._ctid, self._aside
        held.aside_version = self._aside_version
        if aside is None or not done.rejoined:
            return
        for key in done.rejoined:
            (aside.derived if key.derived else aside.kafka).discard(key.data)
            if aside.marks and not key.derived:
                # Another key may have the same mark.
                aside.absent.add(key.data)
        if known:
            aside.version = held.aside_version

    # Words about operations

    def stop(self, operation: int, note: str) -> None:
        """It cannot be carried out as things are."""
        self._say("stop_operation", operation, note)

    def note(self, operation: int, note: str | None) -> None:
        """Why it waits; None: it no longer does."""
        self._say("note_operation", operation, note and f"waits: {note}")

    def waits(self, held: Held) -> list[tuple[int, float, int]]:
        """Operations that wait at home in a partition: for how many seconds, how often in vain."""
        rows = self._connection.execute(queries()["waits_at_home"], self._names(held)).fetchall()
        self._connection.commit()
        return [(operation, seconds, attempts) for operation, seconds, attempts in rows]

    def defer(self, held: Held, operation: int, seconds: float, attempts: int) -> None:
        """Leave an operation alone in a partition for so long, whoever holds it then."""
        names = self._names(held) | {
            "operation": operation,
            "seconds": seconds,
            "attempts": attempts,
        }
        self._connection.execute(queries()["defer_operation"], names)
        self._connection.commit()

    def finish(self) -> None:
        """End the operations of which nothing waits any more."""
        self._connection.execute(queries()["finish_operations"], {"pipeline": self._claim.pipeline})
        self._connection.commit()

    def _say(self, query: str, operation: int, note: str | None) -> None:
        # Messages of exceptions may hold what a text cannot.
        text = note and note.replace("\0", " ")[:1_000]
        self._connection.execute(queries()[query], {"operation": operation, "note": text})
        self._connection.commit()

    # Parts of a transaction

    def _uncount(self, held: Held, causes: Counter[tuple[int, str]]) -> None:
        if causes:
            names = self._names(held) | {
                "partitions": [partition for partition, _ in causes],
                "fingerprints": [fingerprint for _, fingerprint in causes],
                "events": list(causes.values()),
            }
            self._connection.execute(queries()["uncount_causes"], names)

    def _shrink(
        self, less: Mapping[int, int], passed: Mapping[int, int]
    ) -> tuple[set[int], list[Key]]:
        """Queues get shorter; those that ended, and the keys that rejoin therefore (R2, K17).

        ``less``: how many leave each queue; ``passed``: the last place that was replayed.
        """
        if not less:
            return set(), []
        reach("replay-rejoin")
        names = {
            "queues": arrays.numbers(list(less)),
            "events": arrays.numbers(list(less.values())),
        }
        rows = self._connection.execute(queries()["end_queues"], names).fetchall()
        ended = {queue for queue, _, _ in rows}
        if len(ended) < len(less):
            rest = [queue for queue in less if queue not in ended]
            names = {
                "queues": arrays.numbers(rest),
                "events": arrays.numbers([less[queue] for queue in rest]),
                "passed": arrays.numbers([passed.get(queue, 0) for queue in rest]),
            }
            if self._connection.execute(queries()["shrink"], names).rowcount < len(rest):
                self._stale()
        return ended, [Key(key, derived) for _, key, derived in rows if key is not None]

    def _count(self, held: Held, counts: Counts) -> None:
        """Each event where it was consumed (K16: the rows are locked already)."""
        changed = {partition: counter for partition, counter in counts.items() if counter}
        changed.setdefault(held.partition.number, Counter())
        names = self._names(held) | {
            "partitions": list(changed),
            **{name: [counter[name] for counter in changed.values()] for name in COUNTS},
        }
        rows = self._connection.execute(queries()["count_replay"], names).fetchall()
        for partition, ctid, aside, version in rows:
            if partition == held.partition.number:
                self._ctid, self._aside, self._aside_version = ctid, aside, version

    def _account(
        self,
        held: Held,
        operation: int,
        states: Mapping[int, str],
        done: Done,
        seen: int = NONE_SEEN,
    ) -> Done:
        """Say how far the operation is; ``seen``: its items here are over up to this number."""
        self.mark(operation, states)
        names = self._names(held) | {
            "operation": operation,
            "applied": done.applied,
            "failed": done.failed,
            "discarded": done.discarded,
            "restored": done.restored,
            "seen": seen,
            "least": LEAST_TRIED,
        }
        self._connection.execute(queries()["count_operation"], names)
        if done.failed:
            stopped = self._connection.execute(queries()["stop_failing_operation"], names).rowcount
            return done._replace(stopped=bool(stopped))
        return done

    def _stale(self) -> None:
        self._connection.rollback()
        raise Stale

    def _names(self, held: Held) -> dict[str, Any]:
        return {
            "pipeline": self._claim.pipeline,
            "topic": held.partition.topic,
            "partition": held.partition.number,
        }


def places(items: Sequence[Item]) -> dict[str, Any]:
    """Where the events of items came from."""
    return {
        "partitions": arrays.numbers([item.partition for item in items]),
        "offsets": arrays.numbers([item.offset for item in items]),
        "incarnations": arrays.numbers([item.incarnation or 0 for item in items]),
    }
