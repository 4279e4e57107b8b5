"""What somebody should know of a pipeline: decided from rows and times, once a second (S2). Pure.

`Memory` turns what is there at a moment into a `Sight`; `wanted` says which alerts that calls
for; `compare` what to raise, to word anew and to clear.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sideline.backoff import Backoff
from sideline.durations import seconds
from sideline.masking import mask_text
from sideline.policies import Block, Skip

if TYPE_CHECKING:
    from datetime import datetime

    from sideline.pipeline import Pipeline

PARKED = "parked"
DEAD = "dead"
OUTBOX = "outbox"
BACKOFF = "backoff"
BLOCKED = "blocked"
SKIPPED = "skipped"
LAG = "lag"
CRASHES = "crashes"
FLOOD = "flood"
FAILED = "failed"
RETENTION = "retention"
# The subject of what every worker meets: no connection, a setup that has to wait.
WORKERS = "workers"

# The share of skipped events is that of the last minute, or longer until it has so many events.
WINDOW_SECONDS = 60.0
WINDOW_EVENTS = 1_000
# A level that was passed is left when no more than this share of it is reached: what hovers about
# it is not raised again and again.
EASE = 0.5
# One worker may die by accident, two of bad luck.
DEATHS = 3
MOST_CHARACTERS = 1_000
# A pause that never grows could take for ever to add up.
MOST_ATTEMPTS = 10_000


class Key(NamedTuple):
    """What an alert is about: at most one is open for each."""

    kind: str
    subject: str = ""
    """A partition or a service; empty: the pipeline as a whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alerting:
    """Whom to tell, and what else is worth an alert."""

    command: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    webhook: str | None = dataclasses.field(default=None, repr=False)
    lag_seconds: float | None = None
    lag_events: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """From where on somebody should know."""

    retry: Backoff = dataclasses.field(default_factory=Backoff)
    blocks: bool = False
    """Whether a partition may stand on an event that fails for a reason of its own."""
    skipped_share: float | None = None
    lag_seconds: float | None = None
    lag_events: int | None = None

    @classmethod
    def of(cls, pipeline: Pipeline, alerting: Alerting) -> Limits:
        """What a pipeline declares and the settings say."""
        policy = pipeline.on_failure
        return cls(
            pipeline.retry,
            isinstance(policy, Block),
            policy.alarm if isinstance(policy, Skip) else None,
            alerting.lag_seconds,
            alerting.lag_events,
        )


class Row(Protocol):
    """What is asked of a progress row."""

    @property
    def topic(self) -> str: ...  # noqa: D102
    @property
    def partition(self) -> int: ...  # noqa: D102
    @property
    def next_offset(self) -> int: ...  # noqa: D102
    @property
    def attempts(self) -> int: ...  # noqa: D102
    @property
    def trouble(self) -> str | None: ...  # noqa: D102
    @property
    def stuck_at(self) -> int | None: ...  # noqa: D102
    @property
    def paused(self) -> bool: ...  # noqa: D102
    @property
    def consumed(self) -> int: ...  # noqa: D102
    @property
    def skipped(self) -> int: ...  # noqa: D102
    @property
    def parked(self) -> int: ...  # noqa: D102
    @property
    def aside(self) -> int: ...  # noqa: D102
    @property
    def dead(self) -> int: ...  # noqa: D102
    @property
    def unsent(self) -> int: ...  # noqa: D102
    @property
    def outbox_trouble(self) -> str | None: ...  # noqa: D102
    @property
    def event_at(self) -> datetime | None: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What a driver knows at one moment."""

    rows: Sequence[Row]
    others: Sequence[Row] = ()
    """Of topics that the pipeline names no more: what waits of them still waits."""
    lags: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Offsets to go, by partition."""
    services: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What is out of reach, and why."""
    crashes: int = 0
    """Rounds in a row that ended in a crash."""
    crash: str = ""
    went_well: bool = False
    """Whether a round of this run came to its end."""
    expiring: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Partitions of whose parked events only pointers are kept, and what is about to happen."""


class Retrying(NamedTuple):
    """A partition or a service that is tried again and again."""

    subject: str
    seconds: float
    """For how long."""
    attempts: int = 0
    trouble: str = ""
    event: str | None = None
    """The event that a partition stands on."""
    paused: bool = False


class Loss(NamedTuple):
    """How many of the last events were left out."""

    events: int = 0
    skipped: int = 0

    @property
    def share(self) -> float:
        """Of so many as it takes to judge: the first event of a day is no hundred percent."""
        return self.skipped / max(self.events, WINDOW_EVENTS)


NO_LOSS = Loss()


class Unsent(NamedTuple):
    """An outbox that is not empty."""

    subject: str
    records: int
    seconds: float
    """For how long it has not been empty."""
    trouble: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """A pipeline at one moment."""

    parked: int = 0
    aside: int = 0
    dead: int = 0
    unsent: tuple[Unsent, ...] = ()
    retrying: tuple[Retrying, ...] = ()
    loss: Loss = NO_LOSS
    lag_events: int = 0
    lag_seconds: float = 0.0
    crashes: int = 0
    crash: str = ""
    standing: frozenset[str] = frozenset()
    """Partitions that have not moved since the run began."""
    went_well: bool = False
    expiring: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Changes(NamedTuple):
    """How the open alerts differ from what is wanted."""

    raised: dict[Key, str]
    worded: dict[Key, str]
    cleared: list[Key]


class Memory:
    """What has to be known of moments before: since when, and how many until then."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._since: dict[str, float] = {}
        self._starts: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._behind: dict[str, float] = {}
        self._unsent: dict[str, float] = {}
        self._samples: deque[tuple[float, int, int]] = deque()

    def see(self, scene: Scene, now: float) -> Sight:
        """Look at what there is now."""
        rows, lags = scene.rows, scene.lags
        names = {_name(row): row for row in rows}
        retrying = [*self._partitions(names, now), *self._services(scene.services, now)]
        troubled = {one.subject for one in retrying}
        self._since = {name: at for name, at in self._since.items() if name in troubled}
        for name, row in names.items():
            self._starts.setdefault(name, row.next_offset)
        seconds_behind = [self._seconds_behind(row, lags.get(_name(row), 0), now) for row in rows]
        return Sight(
            parked=sum(row.parked for row in (*rows, *scene.others)),
            aside=sum(row.aside for row in (*rows, *scene.others)),
            dead=sum(row.dead for row in (*rows, *scene.others)),
            unsent=tuple(self._outboxes((*rows, *scene.others), now)),
            retrying=tuple(retrying),
            loss=self._loss(rows, now),
            lag_events=sum(lags.values()),
            lag_seconds=max(seconds_behind, default=0.0),
            crashes=scene.crashes,
            crash=scene.crash,
            standing=frozenset(n for n, row in names.items() if row.next_offset <= self._starts[n]),
            went_well=scene.went_well,
            expiring=scene.expiring,
        )

    def outage(self, services: Mapping[str, str], now: float) -> Sight:
        """All there is to be seen while the database is away."""
        return Sight(retrying=tuple(self._services(services, now)))

    def _partitions(self, rows: Mapping[str, Row], now: float) -> Iterable[Retrying]:
        for name, row in rows.items():
            if not (row.attempts or row.trouble):
                continue
            # A driver that comes new to it knows from the attempts how long it must have lasted.
            since = self._since.setdefault(name, now - _waited(row.attempts, self._limits.retry))
            event = None if row.stuck_at is None else f"{name}/{row.stuck_at}"
            trouble = row.trouble or ""
            yield Retrying(name, now - since, row.attempts, trouble, event, row.paused)

    def _outboxes(self, rows: Sequence[Row], now: float) -> Iterable[Unsent]:
        full = {_name(row): row for row in rows if row.unsent}
        self._unsent = {name: self._unsent.get(name, now) for name in full}
        for name, row in full.items():
            yield Unsent(name, row.unsent, now - self._unsent[name], row.outbox_trouble)

    def _services(self, services: Mapping[str, str], now: float) -> Iterable[Retrying]:
        for name, trouble in services.items():
            yield Retrying(name, now - self._since.setdefault(name, now), trouble=trouble)

    def _seconds_behind(self, row: Row, lag: int, now: float) -> float:
        """The age of the oldest event that is not applied yet, as far as rows show it.

        While a partition moves, the last event is about as old as the next. While it stands, it
        grows from there; of an event that nobody has read only its being seen is known.
        """
        name = _name(row)
        moved = row.next_offset > self._last.get(name, row.next_offset)
        self._last[name] = row.next_offset
        if not lag:
            self._behind.pop(name, None)
            return 0.0
        if moved and row.event_at is not None:
            self._behind[name] = min(now, row.event_at.timestamp())
        return now - self._behind.setdefault(name, now)

    def _loss(self, rows: Sequence[Row], now: float) -> Loss:
        consumed, skipped = sum(row.consumed for row in rows), sum(row.skipped for row in rows)
        samples = self._samples
        if samples and consumed < samples[-1][1]:
            # A partition was given up, and its counters with it.
            samples.clear()
        if not samples or consumed > samples[-1][1]:
            samples.append((now, consumed, skipped))
        while len(samples) > 1:
            at, then, _ = samples[1]
            if now - at < WINDOW_SECONDS or consumed - then < WINDOW_EVENTS:
                break
            samples.popleft()
        return Loss(consumed - samples[0][1], skipped - samples[0][2])


def wanted(sight: Sight, limits: Limits, open_alerts: Mapping[Key, str]) -> dict[Key, str]:
    """The alerts that should be open now, and what they say.

    ``open_alerts`` are those that are: some last until more is known than what is seen now.
    """
    found: dict[Key, str] = {}
    if sight.parked:
        found[Key(PARKED)] = _parked(sight)
    found |= _copies(sight, limits, open_alerts)
    for one in sight.retrying:
        key = Key(BLOCKED if limits.blocks and one.event else BACKOFF, one.subject)
        # Nobody tries a paused partition, but what it stands on has not gone away.
        limit = seconds(limits.retry.alert_after) if key.kind == BACKOFF else 0.0
        if key in open_alerts or (one.seconds >= limit and not one.paused):
            found[key] = _retrying(one, limits, key.kind)
    if limits.skipped_share is not None:
        found |= _skipped(sight.loss, limits.skipped_share, open_alerts.get(Key(SKIPPED)))
    found |= _lag(sight, limits, is_open=Key(LAG) in open_alerts)
    for partition, message in sight.expiring.items():
        found[Key(RETENTION, partition)] = message
    if sight.crashes >= DEATHS:
        found[Key(CRASHES)] = (
            f"{sight.crashes} rounds in a row ended in a crash: {_short(sight.crash)}"
        )
    for key, message in open_alerts.items():
        if key not in found and _still_holds(key, sight):
            found[key] = message
    return found


def during_outage(sight: Sight, limits: Limits, open_alerts: Mapping[Key, str]) -> dict[Key, str]:
    """The same while the database is away: what it last said still stands."""
    found = wanted(sight, limits, open_alerts)
    return dict(open_alerts) | {key: text for key, text in found.items() if key.kind == BACKOFF}


def compare(open_alerts: Mapping[Key, str], now_wanted: Mapping[Key, str]) -> Changes:
    """What to raise, to word anew and to clear."""
    return Changes(
        {key: text for key, text in now_wanted.items() if key not in open_alerts},
        {k: text for k, text in now_wanted.items() if k in open_alerts and open_alerts[k] != text},
        [key for key in open_alerts if key not in now_wanted],
    )


def _copies(sight: Sight, limits: Limits, open_alerts: Mapping[Key, str]) -> dict[Key, str]:
    """Events that ended as dead letters, and records that cannot leave."""
    found: dict[Key, str] = {}
    if sight.dead:
        dead = "1 event is" if sight.dead == 1 else f"{sight.dead:,} events are"
        found[Key(DEAD)] = f"{dead} dead: nobody tries them again by itself."
    for outbox in sight.unsent:
        key = Key(OUTBOX, outbox.subject)
        late = outbox.seconds >= seconds(limits.retry.alert_after)
        if outbox.trouble or late or key in open_alerts:
            found[key] = _unsent(outbox)
    return found


def _unsent(outbox: Unsent) -> str:
    records = "1 record waits" if outbox.records == 1 else f"{outbox.records:,} records wait"
    why = f": {_short(outbox.trouble)}" if outbox.trouble else "."
    return f"{records} to be sent{why}"


def _parked(sight: Sight) -> str:
    waiting = "1 event waits" if sight.parked == 1 else f"{sight.parked:,} events wait"
    if not sight.aside:
        return f"{waiting}."
    keys = "1 key is" if sight.aside == 1 else f"{sight.aside:,} keys are"
    return f"{waiting}; {keys} aside."


def _retrying(one: Retrying, limits: Limits, kind: str) -> str:
    attempts = f" (attempt {one.attempts:,})" if one.attempts else ""
    if kind == BLOCKED:
        return f"it stands on event {one.event}{attempts}: {_short(one.trouble)}"
    limit = f"{seconds(limits.retry.alert_after):g} s"
    where = f" at event {one.event}" if one.event else ""
    return f"it has been retried for more than {limit}{where}{attempts}: {_short(one.trouble)}"


def _skipped(loss: Loss, alarm: float, before: str | None) -> dict[Key, str]:
    if loss.share <= (alarm if before is None else alarm * EASE):
        # A driver that has just begun has not seen enough to say that it is over.
        if before is None or loss.events >= WINDOW_EVENTS:
            return {}
        return {Key(SKIPPED): before}
    return {
        Key(SKIPPED): f"{loss.skipped:,} of the last {loss.events:,} events were skipped; "
        f"the alarm level is {alarm:.4g} of them."
    }


def _lag(sight: Sight, limits: Limits, *, is_open: bool) -> dict[Key, str]:
    ease = EASE if is_open else 1.0
    behind = f"it is {sight.lag_events:,} events and {sight.lag_seconds:,.0f} s behind"
    if limits.lag_events is not None and sight.lag_events > limits.lag_events * ease:
        return {Key(LAG): f"{behind}; the limit is {limits.lag_events:,} events."}
    if limits.lag_seconds is not None and sight.lag_seconds > limits.lag_seconds * ease:
        return {Key(LAG): f"{behind}; the limit is {limits.lag_seconds:,g} s."}
    return {}


def _still_holds(key: Key, sight: Sight) -> bool:
    """Whether it is too early to say that it is over: a run that begins has seen little yet."""
    if key.kind in {FLOOD, FAILED} and key.subject:
        return key.subject in sight.standing
    if key.kind == LAG:
        return sight.lag_events > 0 and not sight.went_well
    early = {FLOOD, FAILED, CRASHES}
    return (key.kind in early or key == Key(BACKOFF, WORKERS)) and not sight.went_well


def _waited(attempts: int, retry: Backoff) -> float:
    """How long so many attempts must have taken, as far as it matters."""
    limit = seconds(retry.alert_after)
    waited = 0.0
    for attempt in range(1, min(attempts, MOST_ATTEMPTS)):
        waited += retry.wait_seconds(attempt, 0.5)
        if waited > limit:
            break
    return waited


def _short(text: str) -> str:
    """What an exception said, fit for a line: no password, no page."""
    line = " ".join(mask_text(text).split()) or "no reason was given"
    return line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 1] + "…"


def _name(row: Row) -> str:
    return f"{row.topic}/{row.partition}"
