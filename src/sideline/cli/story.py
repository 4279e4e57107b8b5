"""The demo's story: users who rename themselves, among them Zoey, Zoë and Zoiee."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

import orjson

from sideline import Delete, Event, Pipeline, Upsert

TOPIC = "users"
TABLE = "create table users (id text primary key, name text not null)"
HEROINE = "user-17"
HER_NAMES = ("Zoey", "Zoë", "Zoiee")

_FIRST_NAMES = (
    "Ada", "Alan", "Amal", "Anita", "Barbara", "Bjarne", "Dennis", "Donald", "Edsger", "Frances",
    "Grace", "Guido", "Hedy", "Ivan", "Jean", "Joan", "Ken", "Leslie", "Linus", "Margaret",
    "Niklaus", "Radia", "Shafi", "Sophie", "Tim", "Tony", "Vint",
)  # fmt: skip
_BEYOND_ASCII = ("Chloë", "Gaël", "Joëlle", "Noël", "Raphaël")
_LEAVES = 0.001
# Of the users, those who once choose a name that version 1 cannot write.
_TROUBLED = 0.03

before = Pipeline("login", topics=TOPIC)
"""Version 1: whoever wrote it had never met a Zoë."""

users = Pipeline("login", topics=TOPIC)
"""Version 2: the same pipeline, mended."""


@before.handler
def login_1(event: Event) -> Upsert | Delete:
    """Keep the table in step with the topic, in ASCII."""
    user = event.json()
    if user is None:
        return Delete("users", {"id": (event.key or b"").decode()})
    name = user["name"].encode("ascii").decode()
    return Upsert("users", {"id": user["id"], "name": name}, key="id")


@users.handler
def login(event: Event) -> Upsert | Delete:
    """Keep the table in step with the topic."""
    user = event.json()
    if user is None:
        return Delete("users", {"id": (event.key or b"").decode()})
    return Upsert("users", {"id": user["id"], "name": user["name"]}, key="id")


class Fact(NamedTuple):
    """Something that happened to a user: a name, or None for leaving."""

    user: str
    name: str | None

    @property
    def value(self) -> bytes | None:
        """The record's value; None is a tombstone."""
        return None if self.name is None else orjson.dumps({"id": self.user, "name": self.name})


def tell(users: int, events: int, seed: int = 17) -> list[Fact]:
    """What happens, in order: everyone signs up, then they rename themselves, a few leave.

    Some of them, once, to a name with an 'ë' in it.
    """
    chance = random.Random(seed)  # noqa: S311 - a story, not a secret
    facts = [Fact(f"user-{number}", _name(chance)) for number in range(1, users + 1)]
    others = [fact.user for fact in facts if fact.user != HEROINE]
    for _ in range(events - users):
        gone = chance.random() < _LEAVES
        facts.append(Fact(chance.choice(others), None if gone else _name(chance)))
    return _with_heroine(_with_trouble(facts, chance))


def troubled(facts: Iterable[Fact]) -> set[str]:
    """Users of whom version 1 cannot write something."""
    return {fact.user for fact in facts if fact.name is not None and not fact.name.isascii()}


def ending(facts: Iterable[Fact]) -> dict[str, str]:
    """The table as the source has it when the story is over."""
    last = {fact.user: fact.name for fact in facts}
    return {user: name for user, name in last.items() if name is not None}


def _with_trouble(facts: list[Fact], chance: random.Random) -> list[Fact]:
    """Give some users, in the midst of their lives, a name beyond ASCII."""
    places: dict[str, list[int]] = {}
    for place, fact in enumerate(facts):
        if fact.name is not None and fact.user != HEROINE:
            places.setdefault(fact.user, []).append(place)
    for user in chance.sample(sorted(places), max(1, round(len(places) * _TROUBLED))):
        own = places[user]
        name = f"{chance.choice(_BEYOND_ASCII)} {chance.randrange(1000)}"
        facts[own[len(own) // 3]] = Fact(user, name)
    return facts


def _with_heroine(facts: list[Fact]) -> list[Fact]:
    """Put her names where she signed up, in the middle, and near the end."""
    signed_up = next(place for place, fact in enumerate(facts) if fact.user == HEROINE)
    for place, name in zip((signed_up, len(facts) // 2, len(facts) - 2), HER_NAMES, strict=True):
        facts[place] = Fact(HEROINE, name)
    return facts


def _name(chance: random.Random) -> str:
    return f"{chance.choice(_FIRST_NAMES)} {chance.randrange(1000)}"
