"""Events are written as a whole or not at all, also where their rows are in each other's way."""

from __future__ import annotations

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideline.effects import Delete, Insert, Upsert
from sideline.homes.writer import Work, Writer
from tests.support.examples import examples

SCHEMA = """
create table parent (id int4 primary key, note text not null default '-');
create table child (id int4 primary key, parent int4 references parent (id), word varchar(3));
create table named (id int4 primary key, name varchar(5) unique, amount int4);
"""
COLUMNS = {
    "parent": ("id", "note"),
    "child": ("id", "parent", "word"),
    "named": ("id", "name", "amount"),
}
few = st.integers(1, 5)
words = st.sampled_from(["a", "b", None, "too long"])
numbers = st.sampled_from([1, 2**40])


def upsert(table, **columns):
    return st.builds(lambda **row: Upsert(table, row, key="id"), id=few, **columns)


def insert(table, **columns):
    return st.builds(lambda **row: Insert(table, row), id=few, **columns)


def delete(table):
    return st.builds(lambda number: Delete(table, {"id": number}), few)


KINDS = {
    "inserts": insert("named", name=words),
    "one table": st.one_of(upsert("named", name=words), delete("named")),
    "parents": st.one_of(insert("parent"), insert("child", parent=st.none() | few)),
    "all": st.one_of(
        upsert("named", name=words),
        upsert("named", amount=numbers),
        insert("named", name=words),
        insert("parent"),
        delete("parent"),
        insert("child", parent=st.none() | few),
        upsert("child", parent=st.none() | few, word=words),
        delete("child"),
    ),
}


def batches(kind, most):
    some = st.lists(KINDS[kind], min_size=1, max_size=3).map(tuple)
    return st.lists(st.builds(Work, st.none() | st.integers(1, 4), some), max_size=most)


def left_by(events):
    """What these events leave in the tables, in this order, without anything in their way."""
    tables = {name: {} for name in COLUMNS}
    for effect in (effect for work in events for effect in work.effects):
        rows, number = tables[effect.table], effect.row["id"]
        if isinstance(effect, Delete):
            rows.pop(number, None)
            continue
        new = {"note": "-"} if effect.table == "parent" else {}
        if isinstance(effect, Insert):
            assert number not in rows, "there were two of them"
            rows[number] = {**new, **effect.row}
        else:
            rows[number] = {**rows.get(number, new), **effect.row}
    return {
        name: sorted((tuple(map(row.get, COLUMNS[name])) for row in rows.values()), key=repr)
        for name, rows in tables.items()
    }


@pytest.fixture
def connection(database):
    with psycopg.connect(database) as connection:
        connection.execute(SCHEMA)
        connection.commit()
        yield connection


def check(connection, draw, kind):
    writer = Writer(connection, fold=draw(st.booleans()))
    hold, good = draw(st.booleans()), []
    # Drawing may end an example in its middle.
    connection.rollback()
    connection.execute("select 1")
    for most in (4, 10):
        batch = draw(batches(kind, most))
        written = writer.write(batch, hold_followers=hold)
        bad = {*written.failed, *written.followers}
        good += [work for number, work in enumerate(batch) if number not in bad]
    found = {
        name: sorted(connection.execute(f"select * from {name}").fetchall(), key=repr)
        for name in COLUMNS
    }
    connection.rollback()
    assert found == left_by(good)


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(data=st.data())
def test_the_tables_are_those_of_the_events_that_were_applied(connection, data, kind):
    """Whoever fails, nothing of it stays; of whoever does not, everything (C3, K8)."""
    check(connection, data.draw, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@examples(1000)
@given(data=st.data())
def test_the_tables_are_those_of_the_events_that_were_applied_at_length(connection, data, kind):
    """The same, with many more batches (C3, K8)."""
    check(connection, data.draw, kind)
