"""The ledger against a simple model: whatever arrives, fails, crashes, restarts and is released."""

from __future__ import annotations

import contextlib
from collections import defaultdict

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from sideline import Event, Insert, Recoverable
from sideline.errors import FencedError
from sideline.ledger.place import Place
from sideline.ledger.store import Parting
from tests.support.ledger_model import KINDS, Arrived, Model
from tests.support.machine import (
    EFFECTS,
    IDS,
    KEYS,
    STATES,
    TOPIC,
    Crash,
    Stage,
    check,
    value_of,
)

# As often as not nothing is wrong.
LOTS = ["fine"] * 5 + list(KINDS)
# Steps after which a topic may grow.
LATE = 12

keys = st.sampled_from(KEYS)
said = st.sampled_from(IDS)
specs = st.tuples(keys, said, st.sampled_from(LOTS), st.sampled_from([0, 0, 0, 2]))
arrivals = st.lists(specs, min_size=4, max_size=12)
parts = st.integers(0, 1)
sizes = st.integers(1, 8)


class LedgerMachine(Stage):
    """Two partitions, one or two workers, and somebody who releases keys by hand."""

    @initialize(derives=st.booleans(), together=st.booleans(), first=st.tuples(arrivals, arrivals))
    def start(self, derives, together, first):
        self.model = Model(2, derives=derives)
        self.together = together
        self.open(derives=derives, together=together)
        for number, arriving in enumerate(first):
            self.arrive(number, arriving)

    def _handle(self, event):
        said = event.json()
        if said["kind"] == "fail":
            raise ValueError("fail")
        if said["kind"] == "outside" and self.broken:
            raise Recoverable("the world is broken")
        if said["kind"] == "nothing":
            return None
        effects = self.written(event, said["id"])
        if said["kind"] == "refused":
            effects.append(Insert("limited", {"number": -1}))
        if said["kind"] == "unwritable":
            effects.append(Insert("limited", {"number": "many"}))
        return effects

    def events(self, partition, offset):
        """What a reader would bring."""
        return [
            Event(
                TOPIC,
                event.partition,
                event.offset,
                1_000 + event.offset,
                event.key,
                value_of(event),
            )
            for event in self.model.logs[partition]
            if event.offset >= offset
        ]

    # What happens

    @rule(partition=parts, arriving=arrivals)
    def arrive(self, partition, arriving):
        """Events are produced; offsets have holes."""
        log = self.model.logs[partition]
        for key, said, kind, gap in arriving:
            offset = log[-1].offset + 1 + gap if log else gap
            log.append(Arrived(partition, offset, key, said, kind))

    # Twice: what is alike is chosen as often as its rules are.
    @rule(partition=parts, size=sizes)
    def slice_again(self, partition, size):
        """A slice from its admission to its commit."""
        self.slice(partition, size)

    @rule(partition=parts, size=sizes)
    def slice(self, partition, size):
        """A slice from its admission to its commit."""
        worker = self.workers[partition]
        if partition not in worker.pending and not worker.begin(partition, size):
            return
        self.model.commit(partition, worker.finish(partition))

    @precondition(lambda self: not self.together)
    @rule(partition=parts, size=sizes)
    def begin(self, partition, size):
        """A slice is handled; before its commit, something else may happen."""
        worker = self.workers[partition]
        if partition not in worker.pending:
            worker.begin(partition, size)

    @rule(
        partition=parts,
        size=sizes,
        when=st.one_of(st.sampled_from(["before", "after"]), st.integers(0, 12)),
        restart=st.booleans(),
    )
    def crash(self, partition, size, when, restart):
        """The wire is cut somewhere in a commit; the worker reconnects, or a new one takes over."""
        worker = self.workers[partition]
        if partition not in worker.pending and not worker.begin(partition, size):
            return
        end = worker.pending[partition][1].end
        crash = Crash(worker.connection, when)
        survived = False
        with contextlib.suppress(psycopg.OperationalError):
            end = worker.finish(partition)
            survived = True
        crash.disarm()
        if survived or self._progress(partition) == end:
            self.model.commit(partition, end)
        elif self._is_shared() and not self.model.shared:
            # That keys live in several partitions is written down before the slice is done anew.
            assert self.model.meets_a_key_elsewhere(partition, end)
            self.model.shared = True
        worker.pending.clear()
        if restart:
            self.replace(worker)
        elif not survived:
            worker.reconnect()
            assert worker.hands[partition].held.next_offset == self.model.next[partition]

    def _progress(self, partition):
        rows = self.watch.execute(
            "select next_offset from sideline.progress where pipeline = %s and partition = %s",
            (self.pipeline.name, partition),
        ).fetchall()
        return rows[0][0]

    def _is_shared(self):
        ((shared,),) = self.ask(
            "select bool_or(shared) from sideline.progress where pipeline = %(pipeline)s"
        )
        return shared

    @rule(partition=parts, kill=st.booleans())
    def restart(self, partition, kill):
        """A worker of another process takes the lease; the old one may not know."""
        worker = self.workers[partition]
        if kill:
            worker.connection.close()
        else:
            self.zombies.append(worker)
        self.replace(worker)

    @rule(partition=parts)
    def lease(self, partition):
        """The same process gets the next lease, and trusts what it remembers as far as it may."""
        worker = self.workers[partition]
        worker.pending.clear()
        worker.ledger.release([Parting(hand.held.partition) for hand in worker.hands.values()])
        worker.take()

    @precondition(lambda self: self.zombies)
    @rule()
    def wake(self):
        """Whoever lost its lease writes nothing."""
        worker = self.zombies.pop()
        for number in worker.partitions:
            if number in worker.pending and worker.pending[number][1].events:
                with pytest.raises(FencedError):
                    worker.finish(number)
        worker.connection.close()

    @precondition(lambda self: not self.model.shared and self.steps > LATE)
    @rule()
    def share(self):
        """The topic grew: its keys may live in several partitions."""
        place = Place(self.database, self.pipeline)
        place.run("share_topic", topic=TOPIC)
        place.run("share_partitions", topic=TOPIC)
        place.close()
        self.model.shared = True

    @precondition(lambda self: self.broken or self.steps % 4 == 0)
    @rule()
    def heal_or_break(self):
        """The outside world is broken, or heals."""
        self.broken = not self.broken

    @precondition(lambda self: self.model.parked)
    @rule(pick=st.integers(0, 100), count=st.integers(1, 8))
    def release_again(self, pick, count):
        """The same."""
        self.release(pick, count)

    @precondition(lambda self: self.model.parked)
    @rule(pick=st.integers(0, 100), count=st.integers(1, 8))
    def release(self, pick, count):
        """The first events of a queue are replayed; when none is left, its keys rejoin (R2)."""
        first = self.model.parked[pick % len(self.model.parked)]
        chosen = [first] if first.queue is None else self.model.tail(first.queue)[:count]
        home = first.queue and first.queue.home
        rejoins = self.model.resolve(chosen)
        with psycopg.connect(self.database) as connection:
            self._resolve(connection, [waiting.event for waiting in chosen], home, rejoins=rejoins)

    def _resolve(self, connection, events, home, *, rejoins):
        name = {"pipeline": self.pipeline.name}
        queues = set()
        for event in events:
            row = name | {"partition": event.partition, "offset": event.offset}
            ((queue, fingerprint),) = connection.execute(
                "select queue, fingerprint from sideline.events where pipeline = %(pipeline)s"
                ' and partition = %(partition)s and "offset" = %(offset)s for update',
                row,
            ).fetchall()
            queues.add(queue)
            for statement in _RESOLVE:
                connection.execute(statement, row | {"queue": queue, "fingerprint": fingerprint})
            if (own := self._state_of(event)) is not None:
                connection.execute(_SET_STATE, row | {"id": own})
        (queue,) = queues
        if rejoins:
            for statement in _REJOIN:
                connection.execute(statement, name | {"queue": queue, "home": home})

    def _state_of(self, event):
        if event.kind == "undecodable":
            return None
        if self.pipeline.key is not None:
            return event.said
        return None if event.key is None else event.key.hex()

    # What must hold

    @invariant()
    def the_ledger_is_right(self):
        """Everything below, after each step."""
        self.steps += 1
        self._accounts_are_right()
        self._the_right_events_wait_in_order()
        self._effects_are_those_of_the_model()
        self._nobody_overtakes()

    def _accounts_are_right(self):
        """Every event has one outcome, and every counter counts what is there (design 6)."""
        expected = [
            (
                number,
                self.model.next[number],
                *(counts[name] for name in ("consumed", "applied", "filtered", "parked")),
                0,
                sum(queue.home == number for queue in self.model.queues),
            )
            for number, counts in enumerate(self.model.counts)
        ]
        assert self.ask(_PROGRESS) == expected
        failed = [waiting.event.partition for waiting in self.model.parked if waiting.failed]
        causes = dict(self.ask(_CAUSES))
        assert {number: causes.get(number, 0) for number in range(2)} == {
            number: failed.count(number) for number in range(2)
        }

    def _the_right_events_wait_in_order(self):
        """The parked events, who failed among them, their places and their queues (C1, F4, K15)."""
        rows = self.ask(_PARKED)
        waiting = self.model.parked
        assert [(number, offset, why == "failed") for number, offset, why, *_ in rows] == [
            (*one.event.at, one.failed) for one in waiting
        ]
        assert [(key, value) for _, _, _, key, value, _ in rows] == [
            (one.event.key, value_of(one.event)) for one in waiting
        ]
        ids = {}
        for (*_, queue), one in zip(rows, waiting, strict=True):
            assert (queue is None) == (one.queue is None)
            if queue is not None:
                assert ids.setdefault(queue, one.queue) is one.queue
        found = defaultdict(set)
        for queue, derived, key, home, count in self.ask(_QUEUES):
            assert home == ids[queue].home
            assert count == len(self.model.tail(ids[queue]))
            found[queue].add((derived, key))
        assert found == {number: queue.keys for number, queue in ids.items()}
        assert len(ids) == len(self.model.queues)

    def _effects_are_those_of_the_model(self):
        """Exactly once, in order per key, and none of an event that waits (C1, C3, K8)."""
        effects = self.ask(EFFECTS)
        applied = {event.at: event for event in self.model.effects}
        assert sorted(effects) == sorted(event.at for event in self.model.effects)
        assert not applied.keys() & {one.event.at for one in self.model.parked}
        assert self._by_key(applied[at] for at in effects) == self._by_key(self.model.effects)
        last = {}
        for event in self.model.effects:
            if (own := self._state_of(event)) is not None:
                last[own] = event.at
        assert {key: (number, offset) for key, number, offset in self.ask(STATES)} == last
        assert self.ask("select * from limited") == []

    def _nobody_overtakes(self):
        """No later event of a key took effect while an earlier one of its partition waits (C1)."""
        first = {}
        for one in self.model.parked:
            name = (one.event.partition, self.model.own(one.event))
            first[name] = min(first.get(name, one.event.offset), one.event.offset)
        for number, offset in self.ask(EFFECTS):
            event = next(event for event in self.model.effects if event.at == (number, offset))
            own = self.model.own(event)
            assert own is None or offset < first.get((number, own), offset + 1)

    def _by_key(self, events):
        found = defaultdict(list)
        for event in events:
            own = self.model.own(event)
            if own is not None:
                found[own].append(event.at)
        return found


_PROGRESS = """
select partition, next_offset, consumed, applied, filtered, parked, skipped + unknown, aside
from sideline.progress where pipeline = %(pipeline)s order by partition
"""
_CAUSES = """
select partition, sum(parked) from sideline.causes where pipeline = %(pipeline)s group by 1
"""
_PARKED = """
select partition, "offset", why, key, value, queue
from sideline.events where pipeline = %(pipeline)s and state = 'parked' order by place
"""
_QUEUES = """
select queues.id, keys.derived, keys.key, queues.home, queues.events
from sideline.queues left join sideline.keys on keys.queue = queues.id
where queues.pipeline = %(pipeline)s
"""
# As the owner of a key's home would, in one transaction.
_RESOLVE = (
    """
    update sideline.events set state = 'resolved', queue = null
    where pipeline = %(pipeline)s and partition = %(partition)s and "offset" = %(offset)s
    """,
    """
    update sideline.progress set parked = parked - 1, applied = applied + 1
    where pipeline = %(pipeline)s and partition = %(partition)s
    """,
    "update sideline.queues set events = events - 1 where id = %(queue)s",
    """
    update sideline.causes set parked = parked - 1
    where pipeline = %(pipeline)s and partition = %(partition)s and fingerprint = %(fingerprint)s
    """,
    """
    insert into effects (pipeline, partition, number)
    values (%(pipeline)s, %(partition)s, %(offset)s)
    """,
)
_SET_STATE = """
insert into states (pipeline, id, partition, number)
values (%(pipeline)s, %(id)s, %(partition)s, %(offset)s)
on conflict (pipeline, id) do update set partition = excluded.partition, number = excluded.number
"""
_REJOIN = (
    "update sideline.topics set version = version + 1 where pipeline = %(pipeline)s",
    "delete from sideline.keys where queue = %(queue)s",
    "delete from sideline.queues where id = %(queue)s",
    """
    update sideline.progress set aside = aside - 1, aside_version = aside_version + 1
    where pipeline = %(pipeline)s and partition = %(home)s
    """,
)


@pytest.mark.timeout(900)  # when it fails, the shortest history is worth the wait
def test_the_ledger_does_what_the_model_says(database):
    """Whatever arrives, fails, crashes, restarts and is released (C1, C3, F4, K13, K14, K15)."""
    check(LedgerMachine, database, examples=60, steps=30)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_ledger_does_what_the_model_says_at_length(database):
    """The same, with many more and longer histories (C1, C3, F4, K13, K14, K15)."""
    check(LedgerMachine, database, examples=2_000, steps=60)
