"""What rows that PostgreSQL refuses cost a slice, and what it costs to set events aside."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from bench import figures
from bench.alone import NO_GUARD, TOPIC, Alone, Took
from bench.events import REPEATED_KEYS, user
from bench.suites import Bench, Finding
from sideline import Event, Pipeline, Upsert

SLICE_EVENTS = 25_000
# As many as one of four partitions has of the repeated ones.
SLICE_KEYS = REPEATED_KEYS // 4
POISON = (0, 10, 100)
# A slice with poison in it, of a clean one.
POISON_AIM = 2.0
FOLLOWERS_AIM = 20_000.0
EVENT_BYTES = 200
# One key in so many fails where keys are distinct.
_FAILING_ONE_IN = 10
Body = tuple[str, bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A way in which rows are refused."""

    name: str
    tables: tuple[str, ...]
    spoil: Callable[[dict[str, Any]], dict[str, Any]]
    """Makes a good user a bad one."""
    folded: bool = False
    """Only the row that is left of a key is judged: the bad event has to be its last one."""


def _users(*constraints: str) -> str:
    columns = ("id text primary key", "name varchar(40)", "email text", "seq bigint", *constraints)
    return f"create table users ({', '.join(columns)})"


KINDS = (
    Kind("too long", (_users(),), lambda user: user | {"name": user["name"] * 20}),
    Kind("a check", (_users("check (seq >= 0)"),), lambda user: user | {"seq": -1}),
    Kind(
        "a foreign key",
        (
            "create table mails (email text primary key)",
            "insert into mails values ('a@mail.example')",
            _users("foreign key (email) references mails"),
        ),
        lambda user: user | {"email": "nobody"},
        folded=True,
    ),
)


def measure(bench: Bench) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Poison of every kind, then followers, then keys that fail by themselves."""
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for kind in KINDS:
        for keys in ("repeated", "distinct"):
            more, found = _poisoned(bench, kind, keys)
            rows += more
            findings += found
    more, found = _followers(bench)
    return [*rows, *more, *_failing(bench)], [*findings, *found]


# Poison


def _poisoned(bench: Bench, kind: Kind, keys: str) -> tuple[list[dict[str, Any]], list[Finding]]:
    took: dict[int, list[Took]] = {count: [] for count in POISON}
    rounds = bench.settings.slice_rounds
    text = f"slices refused by {kind.name}, {keys} keys"
    with (
        bench.services.fresh_database(*kind.tables) as database,
        Alone.on(database, _pipeline()) as alone,
        bench.narrator.bar(text, rounds * len(POISON)) as done,
    ):
        alone.slice(alone.events(_slice(kind, keys, 0, -1)))
        order = [count for turn in figures.interleave(POISON, rounds) for count in turn]
        for number, count in enumerate(order):
            events = alone.events(_slice(kind, keys, count, number))
            took[count].append(_checked(alone.slice(events), count))
            done(number + 1)
    clean = [one.seconds for one in took[0]]
    rows = [_poison_row(kind, keys, count, some, clean) for count, some in took.items()]
    findings = [
        Finding(
            f"slice with {count} poison rows ({kind.name}), {keys} keys",
            figures.ratio_by_round([one.seconds for one in took[count]], clean),
            POISON_AIM,
            at_least=False,
            unit="x",
        )
        for count in POISON
        if count
    ]
    return rows, findings


def _checked(took: Took, count: int) -> Took:
    if took.outcome.aside != count or took.outcome.consumed != SLICE_EVENTS:
        message = f"{took.outcome.aside} keys were set aside, not {count}: nothing was measured"
        raise RuntimeError(message)
    return took


def _slice(kind: Kind, keys: str, bad: int, number: int) -> list[Body]:
    """The bodies of a slice, keys of its own: what an earlier one set aside plays no part."""
    different = SLICE_KEYS if keys == "repeated" else SLICE_EVENTS
    bodies = []
    spoiled = set(_spread(bad, different if kind.folded else SLICE_EVENTS))
    for place in range(SLICE_EVENTS):
        key = f"user-{number}-{place % different:08d}"
        body: dict[str, Any] = {
            "id": key,
            "name": f"Zoey {place}",
            "email": "a@mail.example",
            "seq": place,
        }
        # The last ones of their keys come last.
        if (place - (SLICE_EVENTS - different) if kind.folded else place) in spoiled:
            body = kind.spoil(body)
        bodies.append((key, orjson.dumps(body | {"about": "x" * 110})))
    return bodies


def _spread(count: int, room: int) -> list[int]:
    """So many places, evenly and off the ends; each a little further on in the round of keys."""
    return [((2 * number + 1) * room // (2 * count) + number) % room for number in range(count)]


def _pipeline(fails: Callable[[str], bool] = lambda _key: False) -> Pipeline:
    pipeline = Pipeline("bench", topics=TOPIC, guard=NO_GUARD)

    @pipeline.handler
    def row(event: Event) -> Upsert:
        user = event.json()
        if fails(user["id"]):
            message = f"user {user['id']} does not fit"
            raise ValueError(message)
        names = ("id", "name", "email", "seq")
        return Upsert("users", {name: user[name] for name in names}, key="id")

    return pipeline


def _poison_row(
    kind: Kind, keys: str, count: int, took: list[Took], clean: list[float]
) -> dict[str, Any]:
    seconds = [one.seconds for one in took]
    milliseconds = statistics.median(seconds) * 1000
    return {
        "what": f"slice, {count} rows refused by {kind.name}, {keys} keys",
        "measured": f"{milliseconds:,.0f} ms",
        "against_clean": f"{figures.ratio_by_round(seconds, clean):.2f}x",
        "milliseconds": milliseconds,
        "commit_milliseconds": [one.commit_seconds * 1000 for one in took],
        "rounds": seconds,
    }


# Setting aside


def _followers(bench: Bench) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Every event of a slice waits behind its key."""
    seconds = _aside(
        bench, "slices of followers", lambda _key: True, lambda place: place % SLICE_KEYS
    )
    # The first one set the keys aside.
    seconds = seconds[1:]
    rate = SLICE_EVENTS / statistics.median(seconds)
    row = _aside_row("followers, one worker", seconds, SLICE_EVENTS)
    return [row], [Finding("followers parked by one worker, events/s", rate, FOLLOWERS_AIM)]


def _failing(bench: Bench) -> list[dict[str, Any]]:
    """Every tenth event fails, each with a key of its own."""

    def fails(key: str) -> bool:
        return int(key) % _FAILING_ONE_IN == 0

    clean = _aside(bench, "clean slices", lambda _key: False, lambda place: place)
    seconds = _aside(bench, "slices with failures", fails, lambda place: place)
    more = [max(0.0, some - none) for some, none in zip(seconds, clean, strict=True)]
    return [_aside_row("events that fail, distinct keys", more, SLICE_EVENTS // _FAILING_ONE_IN)]


def _aside(
    bench: Bench, text: str, fails: Callable[[str], bool], key_of: Callable[[int], int]
) -> list[float]:
    """The seconds of each slice."""
    rounds = bench.settings.slice_rounds + 1
    seconds: list[float] = []
    with (
        bench.services.fresh_database(_users()) as database,
        Alone.on(database, _pipeline(fails)) as alone,
        bench.narrator.bar(text, rounds) as done,
    ):
        for number in range(rounds):
            places = range(number * SLICE_EVENTS, (number + 1) * SLICE_EVENTS)
            events = alone.events([_body(key_of(place), place) for place in places])
            seconds.append(alone.slice(events).seconds)
            done(number + 1)
    return seconds


def _body(number: int, place: int) -> Body:
    key = f"{number:08d}"
    return key, user(key, place, EVENT_BYTES)


def _aside_row(what: str, seconds: Sequence[float], events: int) -> dict[str, Any]:
    each = statistics.median(seconds) / events
    return {
        "what": f"{what}: time of each",
        "measured": f"{each * 1e6:,.0f} us",
        "against_clean": "-",
        "microseconds": each * 1e6,
        "rounds": list(seconds),
    }
