"""Events, crashes and releases at random, beside a model of what ``dedupe=`` means."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from typing import Any

from tests.support.dedupe_model import Model, Sent
from tests.support.ground import Ground
from tests.support.operations import balanced, operate


def offsets(ground: Ground) -> list[tuple[int, int]]:
    """What took effect: partition and offset."""
    return [(place.partition, place.offset) for place in ground.effects()]


def duplicates(ground: Ground) -> int:
    """How many events were passed as duplicates."""
    return sum(count for (count,) in ground.query("select duplicate from sideline.progress"))


def stored(ground: Ground) -> set[tuple[int, int]]:
    """Which events brought the messages that are stored."""
    return {
        (partition, offset)
        for partition, offset in ground.query(
            'select partition, "offset" from sideline.message_ids'
        )
    }


class Walk:
    """Events, crashes, releases at random, beside the model."""

    KEYS = ("a", "b", "c")
    MESSAGES = 4

    def __init__(
        self,
        ground: Ground,
        seed: str,
        *,
        points: Sequence[str],
        mended: dict[str, Any],
        claims_first: bool = False,
    ) -> None:
        self.ground = ground
        self.model = Model(claims_first=claims_first)
        self.random = random.Random(seed)
        self.points = points
        self.mended = mended
        self.sent = 0

    def walk(self, steps: int) -> None:
        """One step after the other, each compared."""
        for _ in range(steps):
            self.random.choice([self.arrive, self.arrive, self.release])()
            self.compare()

    def arrive(self) -> None:
        """Messages belong to a key, so that the order of queues does not matter."""
        events = []
        for _ in range(self.random.randint(1, 10)):
            key = self.random.choice(self.KEYS)
            number = self.random.randrange(self.MESSAGES + self.sent // 6)
            message = None if self.random.random() < 0.1 else f"{key}{number}"
            # What has no id says nothing else either.
            bad = message is not None and self.random.random() < 0.15
            events.append(Sent(self.sent, key, message, bad))
            self.sent += 1
        self.ground.publish([(one.key, self._value(one)) for one in events])
        for event in events:
            self.model.arrive(event)
        self._work({})

    def release(self) -> None:
        """Everything that waits, mended or not."""
        mended = self.random.random() < 0.6
        operate(self.ground.database, "ground", stop_at=1.0)
        self.model.release(mended=mended)
        self._work(self.mended if mended else {})

    def _value(self, event: Sent) -> str:
        if event.message is None:
            return "x"
        return f"{event.message} {'bad' if event.bad else 'x'}"

    def _work(self, pipeline: dict[str, Any]) -> None:
        point = self.random.choice([*self.points, None])
        if point is not None:
            crash_at = f"{point}:{self.random.randint(1, 3)}"
            worker = self.ground.start(self.ground.lease(), pipeline=pipeline, crash_at=crash_at)
            assert worker.end() in {0, -signal.SIGKILL}
        self.ground.run(pipeline=pipeline)

    def compare(self) -> None:
        """What is applied, stored and waits, beside the model."""
        ground, model = self.ground, self.model
        assert sorted(offset for _, offset in offsets(ground)) == sorted(model.applied)
        assert sorted(place.offset for place in ground.parked()) == model.parked()
        assert stored(ground) == {(0, offset) for offset in model.stored.values()}
        assert duplicates(ground) == model.duplicates
        balanced(ground.database)
