"""What a lease does for the outboxes of its partitions: send, mark, and say what waits.

Kafka answers in its own time, so a thread waits for it; meanwhile the lease goes on with slices.
Only the lease's own thread talks to PostgreSQL.
"""

from __future__ import annotations

import logging
import random
from functools import partial
from typing import TYPE_CHECKING

from sideline.backoff import Backoff
from sideline.crashpoints import reach
from sideline.engine.relay import NotSent
from sideline.errors import FencedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sideline.engine.hand import Hand
    from sideline.engine.relay import Sender
    from sideline.engine.worker import Worker
    from sideline.ledger.outbox import Numbered, Outbox

# While there is other work, records are gathered this long: a transaction of Kafka costs 10 to
# 30 ms however small it is.
GATHER_SECONDS = 0.3
GATHER_RECORDS = 2_000
# With more than this unsent, a partition reads nothing more.
MOST_UNSENT = 10_000
# What is under way is looked after this often when there is nothing else to do.
LOOK_SECONDS = 0.005
# At the end of a lease nobody waits longer for Kafka.
FAREWELL_SECONDS = 2.0
RETRY = Backoff(first="100ms", limit="5s")

log = logging.getLogger(__name__)


class Forwarder:
    """Sends what slices wrote, partition by partition, in the order of their numbers."""

    def __init__(self, worker: Worker, outbox: Outbox) -> None:
        self._worker = worker
        self._outbox = outbox
        self._clock = worker.clock

    def is_due(self, hand: Hand, *, idle: bool) -> bool:
        """Whether there is something to do for the partition's records now."""
        if self._under_way(hand):
            return self._worker.sender(hand.held.partition).landed
        return self._is_worth(hand, idle=idle)

    def wait_seconds(self, hands: Iterable[Hand]) -> float:
        """How long a lease may do nothing without leaving records alone."""
        now = self._clock.monotonic()
        waits = [float("inf")]
        for hand in hands:
            if self._under_way(hand):
                waits.append(LOOK_SECONDS)
            elif hand.held.unsent:
                waits.append(max(0.0, hand.relay_due - now))
        return min(waits)

    def forward(self, hand: Hand, until: float, *, idle: bool = False) -> None:
        """Go on as far as that goes without waiting; FencedError if it has another owner now."""
        sender = self._worker.sender(hand.held.partition)
        while not sender.under_way or sender.landed:
            if not self._land(hand, sender):
                return
            if self._clock.monotonic() >= until or not self._is_worth(hand, idle=idle):
                return
            self._launch(hand, sender)

    def finish(self, hand: Hand, until: float, *, enough: int = 0) -> None:
        """Send until no more than ``enough`` is left; FencedError if it has another owner now.

        What is under way is waited for in any case: after a release nothing may be sent (K1).
        """
        sender = self._worker.sender(hand.held.partition)
        while self._land(hand, sender):
            over = self._clock.monotonic() >= until or hand.relay_due > self._clock.monotonic()
            if hand.held.unsent <= enough or over:
                return
            self._launch(hand, sender)

    def _is_worth(self, hand: Hand, *, idle: bool) -> bool:
        now = self._clock.monotonic()
        if not hand.held.unsent or hand.relay_due > now:
            return False
        return idle or hand.held.unsent >= GATHER_RECORDS or now - hand.relayed_at >= GATHER_SECONDS

    def _under_way(self, hand: Hand) -> bool:
        sender = self._worker.known_sender(hand.held.partition)
        return sender is not None and sender.under_way

    def _launch(self, hand: Hand, sender: Sender) -> None:
        """The next step: only what waits for Kafka is left to a thread."""
        held = hand.held
        if not sender.ready:
            # An init fences the owner before: only an owner may do that (K20, K24).
            self._outbox.check(held)
            reach("before-outbox-init")
            sender.launch(self._worker.threads, sender.begin)
            return
        if not sender.trusted:
            self._trust(hand, sender)
            return
        batch = self._batch(hand)
        if not batch:
            # Somebody else's word: the row itself knows better.
            self._outbox.mark(held, held.outbox_sent)
            return
        reach("before-send")
        hand.relayed_at = self._clock.monotonic()
        sender.launch(self._worker.threads, partial(sender.send, batch))

    def _trust(self, hand: Hand, sender: Sender) -> None:
        """Look again after an init: whoever was frozen before it may have lost the partition.

        From here on the next owner's init makes this producer useless, so that what is sent from
        memory cannot have been sent by another.
        """
        try:
            self._outbox.check(hand.held)
        except FencedError:
            sender.drop()
            raise
        word = sender.word
        sender.sent = word[0] if word and self._outbox.knows(hand.held, *word) else 0
        sender.trusted = True
        self._mark(hand, sender)

    def _batch(self, hand: Hand) -> list[Numbered]:
        """The next records: from memory, where this lease wrote them itself."""
        held = hand.held
        ready = held.ready.take(held.outbox_sent, hand.relay_until)
        if ready:
            return ready
        return self._outbox.read(held, until=_lower(hand.relay_until, held.ready.before))

    def _land(self, hand: Hand, sender: Sender) -> bool:
        """Take note of what came of the last step, if there was one; whether to go on."""
        try:
            sender.land()
        except NotSent as refusal:
            if not self._set_apart(hand, refusal):
                self._wait(hand, refusal)
                return False
        self._mark(hand, sender)
        return True

    def _mark(self, hand: Hand, sender: Sender) -> None:
        held = hand.held
        if not sender.trusted or sender.sent <= held.outbox_sent:
            return
        reach("between-send-and-mark")
        if not self._outbox.mark(held, sender.sent, sender.places):
            # It is ours, but not the outbox that was sent from: the database was restored.
            sender.drop()
            sender.sent = 0
            return
        reach("after-mark")
        hand.relay_until = None
        hand.relay_attempts = 0
        hand.relay_trouble = None

    def _set_apart(self, hand: Hand, refusal: NotSent) -> bool:
        """Whether there is something to send before the record that is refused."""
        number = refusal.number
        if number is None or number <= hand.held.outbox_sent + 1:
            return False
        hand.relay_until = number - 1
        return True

    def _wait(self, hand: Hand, refusal: NotSent) -> None:
        """Nothing overtakes it: it is tried again, and somebody is told (K23)."""
        hand.relay_attempts += 1
        wait = RETRY.wait_seconds(hand.relay_attempts, random.random())  # noqa: S311
        hand.relay_due = self._clock.monotonic() + wait
        if refusal.number is not None:
            hand.relay_until = refusal.number
        if str(refusal) != hand.relay_trouble:
            hand.relay_trouble = str(refusal)
            log.warning("the outbox of %s waits: %s", hand.held.partition, refusal)
            self._outbox.trouble(hand.held, hand.relay_trouble)


def _lower(one: int | None, other: int | None) -> int | None:
    return min(one, other) if one is not None and other is not None else one or other
