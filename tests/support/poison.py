"""Rows that the database refuses, each for a reason of its own; at events that say which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import psycopg

from sideline import Event, Execute, Insert, Upsert
from tests.support import handlers

NUMBER = "number bigint not null"
RAISE = """
create function refuse() returns trigger language plpgsql as $$
begin
    if new.word = 'bad' then raise exception 'no such word'; end if;
    return new;
end $$
"""

# Whatever is written is told elsewhere, and refused there, if at all, at COMMIT.
TELL = """
create table told (word text);
create constraint trigger refused after insert on told deferrable initially deferred
    for each row execute function refuse();
create function tell() returns trigger language plpgsql as $$
begin
    insert into told values (new.word);
    return new;
end $$
"""


class Poison(NamedTuple):
    """A table, and the columns that it takes or refuses."""

    table: str
    fine: Callable[[str], dict[str, Any]]
    """By the key of the event."""
    bad: Callable[[str], dict[str, Any]]
    by_row: bool = True
    """Whether the row alone shows it: where slices end changes nothing then (K9)."""


def _words(fine: Any, bad: Any) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    return lambda _: {"word": fine}, lambda _: {"word": bad}


def _table(columns: str) -> str:
    return f"create table {{}} (id text primary key, {NUMBER}, {columns})"


POISONS: dict[str, Poison] = {
    "check": Poison(_table("word int check (word >= 0)"), *_words(1, -1)),
    "named_check": Poison(_table("word text, check (word <> 'bad')"), *_words("fine", "bad")),
    "not_null": Poison(_table("word text not null"), *_words("fine", None)),
    "integer": Poison(_table("word int"), *_words(1, 2**40)),
    "numeric": Poison(_table("word numeric(4, 2)"), *_words(12.5, 12345)),
    "length": Poison(_table("word varchar(4)"), *_words("fine", "too long")),
    "nul": Poison(_table("word text"), *_words("fine", "b\0d")),
    "surrogate": Poison(_table("word text"), *_words("fine", "\ud800")),
    "uuid": Poison(_table("word uuid"), *_words("6f1b2c3d-0000-4000-8000-000000000000", "bad")),
    "time": Poison(_table("word timestamptz"), *_words("2026-01-31T12:00:00Z", "yesteryear")),
    "json": Poison(_table("word jsonb"), *_words({"a": 1}, {"a": "\0"})),
    "enum": Poison(
        "create type mood as enum ('fine'); " + _table("word mood"), *_words("fine", "bad")
    ),
    "domain": Poison(
        "create domain small as int check (value < 10); " + _table("word small"), *_words(1, 10)
    ),
    "before_trigger": Poison(
        _table("word text") + "; create trigger refused before insert or update on {}"
        " for each row execute function refuse()",
        *_words("fine", "bad"),
    ),
    "after_trigger": Poison(
        _table("word text") + "; create trigger refused after insert or update on {}"
        " for each row execute function refuse()",
        *_words("fine", "bad"),
        by_row=False,
    ),
    "at_commit": Poison(
        _table("word text") + "; create constraint trigger refused after insert or update on {}"
        " deferrable initially deferred for each row execute function refuse()",
        *_words("fine", "bad"),
        by_row=False,
    ),
    "at_commit_elsewhere": Poison(
        _table("word text") + "; create trigger told after insert or update on {}"
        " for each row execute function tell()",
        *_words("fine", "bad"),
        by_row=False,
    ),
    "at_commit_in_a_leaf": Poison(
        _table("word text") + " partition by hash (id);"
        " create table {}_leaf partition of {} for values with (modulus 1, remainder 0);"
        " create constraint trigger refused after insert or update on {}_leaf"
        " deferrable initially deferred for each row execute function refuse()",
        *_words("fine", "bad"),
        by_row=False,
    ),
    "foreign": Poison(
        "create table known (word text primary key); insert into known values ('fine'); "
        + _table("word text references known"),
        *_words("fine", "bad"),
        by_row=False,
    ),
    "deferred_foreign": Poison(
        _table("word text references known deferrable initially deferred"),
        *_words("fine", "bad"),
        by_row=False,
    ),
    # Whoever is bad wants what belongs to somebody else.
    "unique": Poison(
        _table("word text unique"),
        lambda key: {"word": key},
        lambda key: {"word": f"{key.partition(' ')[0]} bob"},
        by_row=False,
    ),
    "deferred_unique": Poison(
        _table("word text unique deferrable initially deferred"),
        lambda key: {"word": key},
        lambda key: {"word": f"{key.partition(' ')[0]} bob"},
        by_row=False,
    ),
}
# Written by SQL of the handler's own.
OWN_SQL = "own_sql"
SQL = """
insert into own_sql_rows (id, number, word) values (%s, %s, 1 / %s)
on conflict (id) do update set number = excluded.number, word = excluded.word
"""
NAMES = (*POISONS, OWN_SQL)
SCHEMA = (
    RAISE,
    TELL,
    *(poison.table.replace("{}", f"{name}_rows") for name, poison in POISONS.items()),
    _table("word int").replace("{}", f"{OWN_SQL}_rows"),
    f"create table touched ({NUMBER})",
)


def effects_of(event: Event) -> list[Any]:
    """The history's row, the user's, and one of the poison's table."""
    key = (event.key or b"").decode()
    name = key.partition(" ")[0]
    row = {"id": key, "number": event.offset}
    bad = event.value == b"bad"
    effects = handlers._effects(event)
    if name == OWN_SQL:
        return [*effects, Execute(SQL, (key, event.offset, int(not bad)))]
    if name not in POISONS:
        return effects
    made = POISONS[name].bad(key) if bad else POISONS[name].fine(key)
    # Not the last one: what comes behind it has to be undone too.
    return [effects[0], Upsert(f"{name}_rows", {**row, **made}, key="id"), *effects[1:]]


def poisoned(_argument: Any) -> Callable[[Event], Any]:
    """Rows of several tables."""
    return effects_of


def poisoned_tx(_argument: Any) -> Callable[[Event, psycopg.Connection[Any]], Any]:
    """The same, after something was written by hand."""

    def handle(event: Event, tx: psycopg.Connection[Any]) -> Any:
        tx.execute("insert into touched values (%s)", (event.offset,))
        return effects_of(event)

    return handle


def poisoned_or_not(_argument: Any) -> Callable[[Event], Any]:
    """The same; events that say so are filtered out, or fail by themselves."""

    def handle(event: Event) -> Any:
        if event.value == b"nothing":
            return None
        if event.value == b"fails":
            raise ValueError("fails")
        return [*effects_of(event), Insert("touched", {"number": event.offset})]

    return handle


handlers.HANDLERS |= {
    "poisoned": poisoned,
    "poisoned_tx": poisoned_tx,
    "poisoned_or_not": poisoned_or_not,
}
