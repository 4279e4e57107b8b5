"""Folded and batched writing has the outcome of one event after the other."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline.effects import Delete, Execute, Insert, Upsert
from sideline.homes.writer import Work, Writer
from tests.support.examples import examples

SCHEMA = """
create table plain (
  id int4 primary key, name varchar(5), amount int4, note text not null default '-'
);
create table guarded (id int4 primary key, name varchar(5), amount int4, version int8);
create table dated (id text primary key, name varchar(5) not null, at timestamptz);
create table checked (id int4 primary key, name text, amount int4 check (amount > 0));
create table pairs (a int4, b text, n numeric(4, 2), primary key (a, b));
create table journal (id int4, word varchar(5) not null, seq int4 generated always as identity);
"""
TABLES = ("plain", "guarded", "dated", "checked", "pairs", "journal")

ids = st.integers(1, 3)
names = st.sampled_from(["a", "b", "c", "d", None, "too long", "nul\0"])
amounts = st.sampled_from([1, 2, 3, None, 2**40, -5])
instants = st.sampled_from(
    [
        None,
        datetime(2024, 1, 2, tzinfo=UTC),
        "2024-01-10T00:00:00Z",
        "2024-1-3 00:00+00",
        "2024-01-10T02:00:00+02:00",
        "nonsense",
    ]
)


def some(**columns):
    """Rows with any of the optional columns."""
    return st.fixed_dictionaries({}, optional=columns)


@st.composite
def effects(draw):  # noqa: PLR0911 - one for each kind
    match draw(st.integers(0, 9)):
        case 0 | 1 | 2:
            row = {"id": draw(ids), **draw(some(name=names, amount=amounts))}
            return Upsert("plain", row, key="id")
        case 3:
            return Delete(draw(st.sampled_from(["plain", "guarded", "checked"])), {"id": draw(ids)})
        case 4 | 5:
            version = draw(st.sampled_from([None, 1, 2, 3, 2**70]))
            row = {"id": draw(ids), "version": version, **draw(some(name=names, amount=amounts))}
            return Upsert("guarded", row, key="id", version="version")
        case 6:
            row = {"id": str(draw(ids)), "at": draw(instants), **draw(some(name=names))}
            return Upsert("dated", row, key="id", version="at")
        case 7:
            row = {"id": draw(ids), **draw(some(name=names, amount=amounts))}
            return Upsert("checked", row, key="id")
        case 8:
            row = {"a": draw(ids), "b": draw(names), **draw(some(n=st.sampled_from([1, 1.5, 999])))}
            return Upsert("pairs", row, key=("a", "b"))
        case _:
            return draw(
                st.one_of(
                    st.builds(lambda i, w: Insert("journal", {"id": i, "word": w}), ids, names),
                    st.builds(lambda i: Insert("plain", {"id": i}), ids),
                    st.just(Insert("nowhere", {"id": 1})),
                    st.just(Execute("update plain set note = note || '!' where id = 1")),
                    st.builds(
                        lambda n: Execute("update plain set name = %s where id = 2", (n,)), names
                    ),
                )
            )


def works(*, sharing):
    keys = st.one_of(st.none(), st.integers(1, 4)) if sharing else st.none()
    work = st.builds(Work, keys, st.lists(effects(), min_size=1, max_size=3).map(tuple))
    return st.lists(work, max_size=14)


def apply_plainly(connection, effect):
    """One effect by the most ordinary statement, without any code of the writer."""
    match effect:
        case Execute(sql, params):
            connection.execute(sql, params)
        case Delete(table, row):
            where = " and ".join(f"{name} = %s" for name in row)
            connection.execute(f"delete from {table} where {where}", list(row.values()))
        case Insert(table, row):
            slots = ", ".join(["%s"] * len(row))
            connection.execute(
                f"insert into {table} ({', '.join(row)}) values ({slots})", list(row.values())
            )
        case Upsert(table, row, key, version):
            key = (key,) if isinstance(key, str) else key
            rest = [name for name in row if name not in key]
            slots = ", ".join(["%s"] * len(row))
            change = ", ".join(f"{name} = excluded.{name}" for name in rest)
            guard = f"where t.{version} is null or excluded.{version} >= t.{version}"
            connection.execute(
                f"insert into {table} as t ({', '.join(row)}) values ({slots}) "
                f"on conflict ({', '.join(key)}) "
                + (f"do update set {change} {guard if version else ''}" if rest else "do nothing"),
                list(row.values()),
            )


def one_by_one(connection, batch, *, hold_followers):
    failed, followers, failed_keys = set(), set(), set()
    for index, work in enumerate(batch):
        if work.key is not None and work.key in failed_keys:
            followers.add(index)
            continue
        try:
            with connection.transaction():
                for effect in work.effects:
                    apply_plainly(connection, effect)
        except psycopg.Error:
            failed.add(index)
            if hold_followers:
                failed_keys.add(work.key)
    return failed, followers


def contents(connection):
    return {
        table: sorted(connection.execute(f"select * from {table}").fetchall(), key=repr)
        if table != "journal"
        else connection.execute("select id, word from journal order by seq").fetchall()
        for table in TABLES
    }


@pytest.fixture
def connection(database):
    with psycopg.connect(database) as connection:
        connection.execute(SCHEMA)
        # Whether PostgreSQL looks at a bad value that no row needs depends on its plan: with a
        # generic one it does not, and which one it takes depends on what was executed before.
        connection.execute("set plan_cache_mode = force_custom_plan")
        connection.commit()
        yield connection


def check(connection, before, batch, *, fold, hold_followers):
    def outcome(act):
        connection.execute("select 1")
        for work in before:
            one_by_one(connection, [work], hold_followers=True)
        connection.execute("savepoint test")
        failed, followers = act()
        found = contents(connection)
        connection.rollback()
        return set(failed), set(followers), found

    writer = Writer(connection, fold=fold)
    expected = outcome(lambda: one_by_one(connection, batch, hold_followers=hold_followers))
    assert outcome(lambda: writer.write(batch, hold_followers=hold_followers)) == expected


ANYTHING = {"before": works(sharing=False), "batch": works(sharing=True)}


@examples(60)
@given(hold=st.booleans(), fold=st.booleans(), **ANYTHING)
def test_the_same_as_one_by_one(connection, before, batch, hold, fold):
    """Whatever a batch holds, tables and failures are those of writing event by event (K8, K9)."""
    check(connection, before, batch, fold=fold, hold_followers=hold)


@pytest.mark.long
@examples(1500)
@given(hold=st.booleans(), fold=st.booleans(), **ANYTHING)
def test_the_same_as_one_by_one_at_length(connection, before, batch, hold, fold):
    """The same, with many more batches (K8, K9)."""
    check(connection, before, batch, fold=fold, hold_followers=hold)


@examples(60)
@given(
    batch=st.lists(
        st.builds(
            lambda number, row, version: Work(
                number,
                (
                    Upsert("guarded", {"id": number, "version": version, **row}, "id", "version")
                    if version is not None
                    else Delete("guarded", {"id": number})
                    if not row
                    else Upsert("plain", {"id": number, **row}, "id"),
                ),
            ),
            ids,
            some(name=st.sampled_from("abc"), amount=st.integers(1, 3)),
            st.one_of(st.none(), st.integers(1, 3)),
        ),
        max_size=30,
    )
)
def test_healthy_batches(connection, batch):
    """Without an error in the way, what was folded is what would have been written (C1, F10)."""
    check(connection, [], batch, fold=True, hold_followers=True)


@examples(25)
@given(
    poison=st.sets(st.integers(0, 599), max_size=8),
    keys=st.sampled_from([40, 600]),
    table=st.sampled_from(["plain", "checked"]),
)
def test_poison_in_long_batches(connection, poison, keys, table):
    """Culprits are found wherever they stand in a long batch (K8)."""
    batch = [
        Work(
            n % keys,
            (Upsert(table, {"id": n % keys, "amount": bad if n in poison else n + 1}, "id"),),
        )
        for n in range(600)
        for bad in [2**40 if table == "plain" else -1]
    ]
    check(connection, [], batch, fold=True, hold_followers=True)
