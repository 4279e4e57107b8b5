"""Effects of a slice as rows in a real PostgreSQL."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from threading import Thread
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import make_conninfo

from sideline.effects import Delete, Execute, Insert, Upsert
from sideline.errors import ConfigurationError
from sideline.homes import refusals
from sideline.homes.writer import Work, Writer


@pytest.fixture(scope="module")
def database(postgres_server):
    """One database for all tests of this file: making one takes longer than most of them."""
    name = f"writer_{uuid4().hex}"
    with psycopg.connect(postgres_server.database, autocommit=True) as admin:
        admin.execute(f"create database {name}")
        yield make_conninfo(postgres_server.database, dbname=name)
        admin.execute(f"drop database {name} with (force)")


@pytest.fixture
def connection(database):
    with (
        psycopg.connect(database, autocommit=True) as admin,
        psycopg.connect(database) as connection,
    ):
        connection.execute("create table users (id int4 primary key, name varchar(10), age int4)")
        connection.commit()
        yield connection
        connection.close()
        admin.execute("drop schema public cascade; create schema public")


@pytest.fixture
def rows(connection):
    """The rows of a query."""
    return lambda query="select * from users order by id": connection.execute(query).fetchall()


def user(number, name, **more):
    return Upsert("users", {"id": number, "name": name, **more}, key="id")


def work(key, *effects):
    return Work(key, effects)


def works(*effects):
    """One event for each effect, each of a key of its own."""
    return [Work(number, (effect,)) for number, effect in enumerate(effects)]


def failures(written):
    return {event: type(error).__name__ for event, error in written.failed.items()}


# -- what is written


def test_upserts(connection, rows):
    """New rows are inserted, known ones changed in the columns that are named."""
    writer = Writer(connection)
    writer.write(works(user(1, "Zoey", age=30), user(2, "Max")))
    writer.write(works(user(1, "Zoë")))
    assert rows() == [(1, "Zoë", 30), (2, "Max", None)]


def test_order_within_a_key(connection, rows):
    """Upsert, delete and upsert of one row end as the last one says (C1)."""
    Writer(connection).write(
        works(user(1, "Zoey", age=30), Delete("users", {"id": 1}), user(1, "Zoiee"), user(2, "a"))
    )
    assert rows() == [(1, "Zoiee", None), (2, "a", None)]


@pytest.mark.parametrize("refused", [False, True])
def test_what_was_foreseen_is_written_as_it_is(connection, rows, refused):
    """Planned while nobody can be asked, also with a row that is refused then (C3, K8)."""
    writer = Writer(connection)
    writer.write(works(user(1, "Zoey")))
    name = "far too long a name" if refused else "Zoiee"
    coming = works(user(1, "Zoë"), user(2, "Max"), user(1, name), user(3, "Eve"))
    _foresee_alone(writer, coming, connection)
    assert writer._planned is not None
    written = writer.write(coming)
    assert failures(written) == ({2: "StringDataRightTruncation"} if refused else {})
    assert rows("select id, name from users order by id") == [
        (1, "Zoë" if refused else "Zoiee"),
        (2, "Max"),
        (3, "Eve"),
    ]


@pytest.mark.parametrize("why", ["unknown", "checks", "unfolded", "nothing", "sql"])
def test_what_takes_a_question_is_not_foreseen(connection, why):
    """The connection belongs to somebody else then (C3)."""
    if why == "checks":
        connection.execute("alter table users add check (age > 0)")
    writer = Writer(connection, fold=why != "unfolded")
    if why != "unknown":
        writer.write(works(user(1, "Zoey")))
    effects = {"nothing": [], "sql": [Execute("select 1")]}.get(why, [user(1, "Zoë")])
    _foresee_alone(writer, works(*effects), connection)
    assert writer._planned is None


def _foresee_alone(writer, coming, connection):
    """Fails if the connection is asked anything."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("execute", "cursor", "commit", "rollback"):
            patch.setattr(connection, name, None)
        writer.foresee(coming)


def test_delete_of_nothing(connection, rows):
    """Deleting what is not there is no error (C7)."""
    written = Writer(connection).write(works(Delete("users", {"id": 1}), user(2, "a")))
    assert not written.failed
    assert rows() == [(2, "a", None)]


def test_delete_by_other_columns_keeps_log_order(connection, rows):
    """A delete that goes by another column than the upserts' key takes its place among them."""
    Writer(connection).write(
        works(user(1, "a"), user(2, "b"), Delete("users", {"name": "a"}), user(3, "a"))
    )
    assert rows() == [(2, "b", None), (3, "a", None)]


def test_inserts_and_upserts_of_one_table_keep_log_order(connection, rows):
    """An insert that comes after the upsert of its row fails, one before it does not."""
    written = Writer(connection).write(
        works(Insert("users", {"id": 1}), user(1, "a"), user(2, "b"), Insert("users", {"id": 2}))
    )
    assert failures(written) == {3: "UniqueViolation"}
    assert rows() == [(1, "a", None), (2, "b", None)]


def test_execute_is_a_barrier(connection, rows):
    """A statement sees what came before it, and what comes after sees the statement."""
    Writer(connection).write(
        works(
            user(1, "a"),
            Execute("update users set age = 100 % 7 where name like 'a%'"),
            Execute("update users set age = age + %s", (10,)),
            Execute("update users set age = age + %(n)s", {"n": 100}),
            user(2, "a"),
        )
    )
    assert rows() == [(1, "a", 112), (2, "a", None)]


def test_version_guard(connection, rows):
    """An older event never replaces a newer row, inside a slice and across slices (F10)."""
    connection.execute("create table v (id text primary key, name text, at timestamptz)")
    connection.execute("set local timezone = 'UTC'")
    writer = Writer(connection)

    def at(moment, name):
        return Upsert("v", {"id": "x", "name": name, "at": moment}, key="id", version="at")

    writer.write(works(at("2024-01-10T00:00:00Z", "late"), at("2024-01-09T23:00:00Z", "early")))
    assert rows("select name from v") == [("late",)]
    writer.write(works(at("2024-1-2", "older"), at(None, "none")))
    assert rows("select name from v") == [("late",)]
    writer.write(works(at("2024-1-11", "a"), at("2024-02-01", "b"), at("2024-1-12", "c")))
    assert rows("select name from v") == [("b",)]
    writer.write(works(at(datetime(2024, 2, 1, tzinfo=UTC), "same")))
    assert rows("select name from v") == [("same",)]


def test_versions_that_do_not_compare_in_python(connection, rows):
    """PostgreSQL compares what Python cannot, and refuses what it does not understand (F10)."""
    connection.execute("create table v (id int4 primary key, v int8)")
    written = Writer(connection).write(
        works(
            *(
                Upsert("v", {"id": 1, "v": v}, key="id", version="v")
                for v in (9, "10", 3, "x", None)
            )
        )
    )
    assert failures(written) == {3: "InvalidTextRepresentation"}
    assert rows("select v from v") == [(10,)]


TYPES = [
    ("int2", 7),
    ("int8", 2**62),
    ("numeric", Decimal("0.12345678901234567890")),
    ("numeric(10, 2)", 5),
    ("float8", 0.1),
    ("float4", 0.5),
    ("bool", True),
    ("text", 'a,"b"\\{}\n\t'),
    ("varchar(3)", "äöü"),
    ("char(3)", "abc"),
    ("bytea", b"\x00\xff"),
    ("uuid", UUID(int=7)),
    ("date", date(2024, 2, 29)),
    ("time", time(1, 2, 3, 4)),
    ("timestamp", datetime(2024, 1, 2, 3, 4, 5, 6)),  # noqa: DTZ001 - without a zone on purpose
    ("timestamptz", datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
    ("interval", timedelta(days=-3, seconds=5, microseconds=7)),
    ("json", {"b": 1, "a": [None, "x"]}),
    ("jsonb", [1, {"a": "ü"}]),
    ("int4[]", [1, None, 3]),
    ("text[]", ["a", 'b"', "{c,d}", ""]),
    ("text[]", []),
    ("int4[][]", [[1, 2], [3, 4]]),
    ("varchar(3)[]", ["abc"]),
    ("colour", "red"),
    ("short", "abc"),
    ("inet", None),
    ("bit(3)", "101"),
    ("box", "(1,1),(0,0)"),
]


@pytest.mark.parametrize(("kind", "value"), TYPES)
def test_types(connection, kind, value):
    """A value arrives as what it is, alone and among many, by every way of writing (E1)."""
    connection.execute("create type colour as enum ('red', 'green')")
    connection.execute("create domain short as varchar(3) check (value <> 'bad')")
    connection.execute(f"create table t (id int4 primary key, c {kind})")

    def batch(start):
        return works(*(Upsert("t", {"id": start + n, "c": value}, key="id") for n in range(3)))

    writer = Writer(connection)
    assert not writer.write(batch(0)).failed
    writer.apply_one([Upsert("t", {"id": 10, "c": value}, key="id")])
    assert not writer.write(
        [*batch(20), *works(Upsert("t", {"id": "x"}, key="id"))]
    ).failed.keys() - {3}
    found = connection.execute("select c from t").fetchall()
    assert len(found) == 7
    assert all(row == (value,) for row in found)


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        ("int4", 2**40, "NumericValueOutOfRange"),
        ("int8", 2**70, "NumericValueOutOfRange"),
        ("int4", 1.5, "InvalidTextRepresentation"),
        ("int4", True, "InvalidTextRepresentation"),
        ("varchar(3)", "abcd", "StringDataRightTruncation"),
        ("char(3)", "abcd", "StringDataRightTruncation"),
        ("short", "abcd", "StringDataRightTruncation"),
        ("short", "bad", "CheckViolation"),
        ("varchar(3)[]", ["abcd"], "StringDataRightTruncation"),
        ("bit(3)", "1011", "StringDataLengthMismatch"),
        ("numeric(4, 2)", 123, "NumericValueOutOfRange"),
        ("text", "nul\0", "DataError"),
        ("text", "\ud800", "UnicodeEncodeError"),
        ("text", {"a": 1}, "TypeError"),
        ("timestamptz", "yesteryear", "InvalidDatetimeFormat"),
        ("timestamptz", 20240101, "TypeError"),
        ("jsonb", {"a": float("nan")}, "InvalidTextRepresentation"),
        ("jsonb", {"a": "\0"}, "UntranslatableCharacter"),
        ("colour", "blue", "InvalidTextRepresentation"),
        ("uuid", "x", "InvalidTextRepresentation"),
        ("int4 not null", None, "NotNullViolation"),
        ("int4 check (c > 0)", 0, "CheckViolation"),
        ("int4 generated always as (1) stored", 1, "ValueError"),
        ("int4 generated always as identity", 1, "ValueError"),
    ],
)
def test_values_that_do_not_fit(connection, kind, value, error):
    """A value is stored as it is or it is an error, never cut, rounded or wrapped (K9)."""
    connection.execute("create type colour as enum ('red', 'green')")
    connection.execute("create domain short as varchar(3) check (value <> 'bad')")
    connection.execute(f"create table t (id int4 primary key, c {kind})")
    bad = Upsert("t", {"id": 1, "c": value}, key="id")
    later = Upsert("t", {"id": 2}, key="id")
    written = Writer(connection).write([work("k", bad), work("k", later), work("x", user(1, "a"))])
    assert failures(written) == {0: error}
    assert written.followers == {1}
    assert connection.execute("select count(*) from t").fetchone() == (0,)
    assert connection.execute("select count(*) from users").fetchone() == (1,)


def test_names(connection, rows):
    """Other schemas, quoted names and a % in a name are names like any other."""
    connection.execute('create schema "My App"')
    name = '"My App"."T%s ""x"""'
    connection.execute(
        f'create table {name} ("Id" int4, "a b%" text, "lo" int4, primary key ("Id", "lo"))'
    )
    good = [Upsert(name, {"Id": n, "a b%": "v", "lo": n}, key=("Id", "lo")) for n in range(3)]
    bad = Upsert(name, {"Id": 9, "a b%": "v", "lo": 2**40}, key=("lo", "Id"))
    written = Writer(connection).write(works(*good, bad, Delete(name, {"lo": 1, "Id": 1})))
    assert failures(written) == {3: "NumericValueOutOfRange"}
    assert rows(f'select "Id" from {name} order by 1') == [(0,), (2,)]


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        (Upsert("nowhere", {"id": 1}, key="id"), "table nowhere does not exist"),
        (Upsert("users", {"id": 1, "nane": "x"}, key="id"), "has no column nane"),
        (Upsert("users", {"name": "x"}, key="id"), "lacks its key column"),
        (Upsert("users", {"id": 1}, key="id", version="at"), "lacks its version column"),
        (Upsert("users", {}, key="id"), "needs a row"),
        (Insert("users", None), "needs a row"),
        (Insert("users; drop table users", {"id": 1}), "is not the name of a table"),
        (Insert("a_view", {"id": 1}), "is not a table"),
        (Delete("users", {}), "needs a row"),
    ],
)
def test_effects_that_fit_no_table(connection, rows, effect, message):
    """The event fails with what is wrong; the others are applied (K10)."""
    connection.execute("create view a_view as select 1 as id")
    written = Writer(connection).write(
        [work(1, user(1, "a")), work(2, effect), work(3, user(3, "c"))]
    )
    assert list(written.failed) == [1]
    assert message in str(written.failed[1])
    assert rows() == [(1, "a", None), (3, "c", None)]


# -- whose failure it is


def test_none_of_the_effects_of_a_failed_event_stays(connection, rows):
    """An event that fails in one table leaves nothing in another (K8)."""
    connection.execute("create table log (word varchar(3))")
    written = Writer(connection).write(
        [
            work("a", user(1, "a"), Insert("log", {"word": "abc"})),
            work("b", user(2, "b"), Insert("log", {"word": "too long"})),
            work("b", user(2, "b2"), Insert("log", {"word": "x"})),
            work("c", user(3, "c"), Insert("log", {"word": "def"})),
        ]
    )
    assert failures(written) == {1: "StringDataRightTruncation"}
    assert written.followers == {2}
    assert rows() == [(1, "a", None), (3, "c", None)]
    assert rows("select word from log") == [("abc",), ("def",)]


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_an_event_whose_rows_clash_with_each_other_leaves_none(connection, rows, taken):
    """Several rows of one event in one table, of which some could be written (C3, K8)."""
    three = [Insert("users", {"id": number, "name": "three"}) for number in range(3)]
    three[(taken + 1) % 3] = three[taken]
    other = Insert("users", {"id": 9, "name": "b"})
    written = Writer(connection).write([work("a", *three), work("b", other)])
    assert failures(written) == {0: "UniqueViolation"}
    assert rows() == [(9, "b", None)]


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_an_event_of_which_one_row_is_refused_leaves_none(connection, rows, taken):
    """Wherever it stands among its rows of one table (C3, K8)."""
    connection.execute("insert into users (id, name) values (%s, 'before')", (taken,))
    three = [Insert("users", {"id": number, "name": "three"}) for number in range(3)]
    other = Insert("users", {"id": 9, "name": "b"})
    written = Writer(connection).write([work("a", *three), work("b", other)])
    assert failures(written) == {0: "UniqueViolation"}
    assert rows() == [(taken, "before", None), (9, "b", None)]


def test_followers_are_applied_where_order_does_not_matter(connection, rows):
    """With hold_followers=False a later event of a failed key goes on (F5)."""
    batch = [work("k", user(1, "much too long")), work("k", user(1, "short"))]
    written = Writer(connection).write(batch, hold_followers=False)
    assert (list(written.failed), written.followers) == ([0], frozenset())
    assert rows() == [(1, "short", None)]


def test_folding_does_not_hide_an_error(connection, rows):
    """A row that is replaced in the same slice is judged all the same (K9)."""
    batch = [work(1, user(1, "ok")), work(1, user(1, "much too long")), work(1, user(1, "fine"))]
    written = Writer(connection).write(batch)
    assert (list(written.failed), written.followers) == ([1], {2})
    assert rows() == [(1, "ok", None)]


def test_a_folded_row_carries_the_healthy_write_of_another_key(connection, rows):
    """Two keys write one row, one of them badly: the other's write stays (K8)."""
    batch = [
        work("a", user(1, "a", age=1)),
        work("b", user(1, "b", age=2**40)),
        work("c", user(2, "c")),
    ]
    written = Writer(connection).write(batch)
    assert list(written.failed) == [1]
    assert rows() == [(1, "a", 1), (2, "c", None)]


@pytest.mark.parametrize("fold", [True, False])
def test_many_poison_rows(connection, rows, fold):
    """Only the culprits fail, on and off the borders of the chunks they are sought in (K8)."""
    connection.execute("alter table users add constraint adult check (age >= 18)")
    numbers = range(1200)
    poison = {0, 7, 8, 127, 128, 129, 600, 1023, 1024, 1199}
    written = Writer(connection, fold=fold).write(
        [work(n, user(n, "x", age=5 if n in poison else 30)) for n in numbers]
    )
    assert set(written.failed) == poison
    assert {type(error) for error in written.failed.values()} == {errors.CheckViolation}
    assert [row[0] for row in rows()] == [n for n in numbers if n not in poison]


def test_an_undone_event_costs_no_prepared_statement(connection, rows):
    """What was prepared outlives the rollback of one event: others need it."""
    Writer(connection).write(works(user(10, "a")))
    written = Writer(connection).write(
        works(*(user(number, "x" * (11 if number % 3 else 1)) for number in range(1, 10)))
    )
    assert sorted(written.failed) == [0, 1, 3, 4, 6, 7]
    assert [number for number, *_ in rows()] == [3, 6, 9, 10]
    kept = "select count(*) from pg_prepared_statements where statement ilike 'insert into%users%'"
    assert rows(kept) == [(1,)]


def test_statements_that_fail_while_they_are_prepared_do_not_heap_up(connection, rows, monkeypatch):
    """They stay in the server under no name: now and then all are forgotten."""
    monkeypatch.setattr("sideline.homes.savepoints.UNDONE_UNTIL_FORGOTTEN", 10)
    writer = Writer(connection)
    for _ in range(20):
        assert len(writer.write(works(user(1, "x" * 11), user(2, "x" * 12))).failed) == 2
    assert rows("select count(*) from pg_prepared_statements")[0][0] < 10


def test_doubts_that_turn_out_wrong(connection, rows):
    """Trailing spaces are cut off: such a text passes, and whoever is behind it finds it (K8)."""
    long, spaces = "x" * 11, "y" + " " * 20
    connection.execute("alter table users add unique (name)")
    effects = [user(n, {0: long, 1: long, 2: spaces}.get(n % 4, f"n{n}")) for n in range(40)]
    # Two want the same name: the first has it.
    written = Writer(connection).write(works(*effects, user(40, long), user(41, long)))
    failed = failures(written)
    assert {n for n, name in failed.items() if name == "StringDataRightTruncation"} == {
        *(n for n in range(40) if n % 4 < 2),
        40,
        41,
    }
    assert {n for n, name in failed.items() if name == "UniqueViolation"} == set(range(6, 40, 4))
    names = {name.rstrip() for _, name, _ in rows()}
    assert names == {"y", *(f"n{n}" for n in range(3, 40, 4))}


@pytest.mark.parametrize("hold", [True, False])
def test_those_behind_a_refused_one_of_their_key(connection, rows, hold):
    """They wait behind it, or are applied where order does not matter, as the caller says (F4)."""
    long = "x" * 11
    batch = [
        work(key, user(number, long if number % 3 == 0 else f"n{number}"))
        for number, key in enumerate("abcdeabcdeabcde")
    ]
    written = Writer(connection).write(batch, hold_followers=hold)
    bad = set(range(0, 15, 3))
    first = {key: min(n for n in bad if batch[n].key == key) for key in "abcde"}
    behind = {n for n in range(15) if n > first[batch[n].key]} if hold else set()
    assert set(written.failed) == bad - behind
    assert written.followers == behind
    assert {number for number, *_ in rows()} == set(range(15)) - bad - behind


def test_connection_lost_while_asking(connection, database, monkeypatch):
    """What ends the connection is raised as such, and is nobody's fault."""
    writer = Writer(connection)
    writer.write(works(user(1, "a")))
    asked = refusals.refusals

    def lost(*arguments):
        with psycopg.connect(database, autocommit=True) as admin:
            admin.execute("select pg_terminate_backend(%s)", (connection.info.backend_pid,))
        return asked(*arguments)

    monkeypatch.setattr("sideline.homes.writer.refusals", lost)
    with pytest.raises(psycopg.OperationalError):
        writer.write(works(*(user(number, "x" * 11) for number in range(5)), user(9, "ok")))
    assert connection.broken or connection.closed


def test_lock_while_asking(connection, database):
    """A row that somebody else holds is no fault of the event's: the slice is tried again."""
    writer = Writer(connection)
    writer.write(works(user(1, "a"), user(2, "b")))
    connection.commit()
    connection.execute("set lock_timeout = '50ms'")
    spaces = "y" + " " * 20
    with psycopg.connect(database) as other:
        other.execute("select from users where id = 2 for update")
        with pytest.raises(errors.LockNotAvailable):
            writer.write(works(user(1, "x" * 11), user(2, spaces), user(3, "x" * 11), user(4, "c")))
    connection.rollback()


def test_checks_are_asked_about_rows_that_are_left_out(connection, rows):
    """A CHECK that a replaced row violates fails its event, without writing every row (K9)."""
    connection.execute('alter table users add column "100%" text')
    connection.execute("""alter table users add check (age % 2 = 0 and "100%" like '%a%')""")
    statements = []
    connection.cursor_factory = _recording(statements)

    def batch(odd):
        return [
            work(n % 3, user(n % 3, f"v{n}", age=3 if n == odd else 2, **{"100%": "banana"}))
            for n in range(30)
        ]

    writer = Writer(connection)
    assert not writer.write(batch(None)).failed
    assert statements.count("insert users") == 1
    written = writer.write(batch(4))
    assert failures(written) == {4: "CheckViolation"}
    assert written.followers == set(range(7, 30, 3))
    assert [row[:2] for row in rows()] == [(0, "v27"), (1, "v1"), (2, "v29")]


def test_checks_that_fail_themselves(connection, rows):
    """A constraint that cannot be evaluated for a row is that row's error (K9)."""
    connection.execute("alter table users add check (10 / age > 0)")
    written = Writer(connection).write([work(1, user(1, "a", age=n)) for n in (1, 0, 2)])
    assert failures(written) == {1: "DivisionByZero"}
    assert rows() == [(1, "a", 1)]


def test_checks_on_the_whole_row(connection, rows):
    """A constraint that takes the row as a whole is left to PostgreSQL (K9)."""
    connection.execute("alter table users add check (users is not null)")
    writer = Writer(connection)
    written = writer.write([work(1, user(1, name, age=1)) for name in ("a", None, "b")])
    assert failures(written) == {1: "CheckViolation"}
    assert rows() == [(1, "a", 1)]
    assert writer.notes()


def test_more_poison_than_the_judge_sorts_out(connection, rows):
    """Hundreds of bad rows among good ones are found as well (K8)."""
    batch = [work(n, user(n, "much too long" if n % 2 else "x")) for n in range(1000)]
    written = Writer(connection).write(batch)
    assert set(written.failed) == set(range(1, 1000, 2))
    assert len(rows()) == 500


def test_a_unique_value_goes_to_the_first_in_the_log(connection, rows):
    """Rows are written in key order, but who comes first is decided by the log (K8)."""
    connection.execute("create unique index on users (name)")
    batch = [work(2, user(2, "Zoë")), work(1, user(1, "Zoë")), work(3, user(3, "Max"))]
    written = Writer(connection).write(batch)
    assert failures(written) == {1: "UniqueViolation"}
    assert rows() == [(2, "Zoë", None), (3, "Max", None)]


def test_a_unique_value_that_is_set_free_can_be_taken(connection, rows):
    """One key gives up a name that another takes; key order alone would refuse it (K8)."""
    connection.execute("create unique index on users (name)")
    writer = Writer(connection)
    writer.write(works(user(2, "Zoë")))
    written = writer.write([work(2, user(2, "Max")), work(1, user(1, "Zoë"))])
    assert not written.failed
    assert rows() == [(1, "Zoë", None), (2, "Max", None)]


def test_parents_before_children(connection, rows):
    """Foreign keys decide the order of tables, both ways (K16)."""
    connection.execute("create table a_child (id int4 primary key, parent int4 references users)")

    def child(number):
        return Upsert("a_child", {"id": number, "parent": number}, key="id")

    writer = Writer(connection)
    statements = []
    connection.cursor_factory = _recording(statements)
    writer.write([work(n, user(n, "p"), child(n)) for n in range(3)])
    assert [name for name in statements if name.startswith("insert")] == [
        "insert users",
        "insert a_child",
    ]
    statements.clear()
    writer.write(
        [work(n, Delete("a_child", {"id": n}), Delete("users", {"id": n})) for n in range(3)]
    )
    assert [name for name in statements if name.startswith("delete")] == [
        "delete a_child",
        "delete users",
    ]
    assert rows() == []


def test_orphans_are_asked_for_at_once(connection, monkeypatch):
    """Of many rows, those without a parent are told apart by one question, not by trying (K8)."""
    connection.execute(
        'create table "the 100%% parents" (a int, "b""c" text, primary key (a, "b""c"))'
    )
    connection.execute("insert into \"the 100%% parents\" values (1, 'x')", prepare=False)
    connection.execute(
        "create table child (id int primary key, b text, a int, foreign key (a, b)"
        ' references "the 100%% parents" (a, "b""c"))'
    )
    monkeypatch.setattr(Writer, "_search", None)
    rows = [(n, 1 if n % 7 else 2, "x") for n in range(60)] + [(60, None, "y"), (61, 2, None)]
    batch = [work(n, Upsert("child", {"id": n, "a": a, "b": b}, key="id")) for n, a, b in rows]
    written = Writer(connection).write(batch)
    assert failures(written) == dict.fromkeys(range(0, 60, 7), "ForeignKeyViolation")
    ((count,),) = connection.execute("select count(*) from child").fetchall()
    assert count == len(rows) - len(written.failed)


def test_a_child_of_a_failed_parent_fails_too(connection, rows):
    """What depends on a row that was refused is refused, as in log order (K8)."""
    connection.execute("create table child (id int4 primary key, parent int4 references users)")
    child = Upsert("child", {"id": 1, "parent": 1}, key="id")
    written = Writer(connection).write(
        [work("p", user(1, "much too long")), work("c", child), work("q", user(2, "b"))]
    )
    assert failures(written) == {0: "StringDataRightTruncation", 1: "ForeignKeyViolation"}
    assert rows() == [(2, "b", None)]


def test_cascades_keep_log_order(connection, rows):
    """A child that is deleted along with its parent does not come back with the parent."""
    connection.execute(
        "create table child (id int4 primary key, parent int4 references users on delete cascade)"
    )
    child = Upsert("child", {"id": 1, "parent": 1}, key="id")
    Writer(connection).write(works(user(1, "a"), child, Delete("users", {"id": 1}), user(1, "b")))
    assert rows() == [(1, "b", None)]
    assert rows("select * from child") == []


def test_deferred_constraints_are_found_before_commit(connection, rows):
    """A constraint that waits until COMMIT fails its event, not the slice (K8)."""
    connection.execute(
        "create table child (id int4 primary key, "
        "parent int4 references users deferrable initially deferred)"
    )
    child = Upsert("child", {"id": 1, "parent": 7}, key="id")
    written = Writer(connection).write(works(user(1, "a"), child, user(2, "b")))
    connection.commit()
    assert failures(written) == {1: "ForeignKeyViolation"}
    assert len(rows()) == 2


def test_what_was_judged_once_may_wait_again(connection, rows):
    """Within an event a child may come before its parent, whoever failed before it (K8)."""
    connection.execute(
        "create table child (id int4 primary key, "
        "parent int4 references users deferrable initially deferred)"
    )
    families = [
        work(
            n,
            Execute("insert into child values (%s, %s)", (n, n)),
            user(n, "a" * (1 + 99 * (n == 3))),
        )
        for n in range(200)
    ]
    written = Writer(connection).write(families)
    connection.commit()
    assert failures(written) == {3: "StringDataRightTruncation"}
    assert len(rows("select from child")) == 199


def test_constraints_of_tables_that_no_effect_names(connection, rows):
    """What only COMMIT complained about is found once the writer knows (K8)."""
    connection.execute(
        "create table seen (name text, constraint short check (length(name) < 5));"
        "create function see() returns trigger language plpgsql as"
        " $$ begin insert into seen values (new.name); return new; end $$;"
        "create trigger see after insert or update on users for each row execute function see();"
        "create table seen_once (name text unique deferrable initially deferred);"
        "create function once() returns trigger language plpgsql as"
        " $$ begin insert into seen_once values (new.name); return new; end $$;"
        "create trigger once after insert on seen for each row execute function once()"
    )
    connection.commit()
    given = works(user(1, "a"), user(2, "b"), user(3, "a"), user(4, "much too long"), user(5, "e"))
    writer = Writer(connection)
    assert failures(writer.write(given)) == {3: "StringDataRightTruncation"}
    with pytest.raises(errors.UniqueViolation):
        connection.commit()
    connection.rollback()
    assert writer.judge_early()
    assert failures(writer.write(given)) == {
        2: "UniqueViolation",
        3: "StringDataRightTruncation",
    }
    connection.commit()
    assert [number for number, *_ in rows()] == [1, 2, 5]
    assert not writer.judge_early(), "it knew already"
    assert writer.in_one(works(user(6, "f"))) is None


def test_before_triggers_decide_in_log_order(connection, rows):
    """A trigger may mend a row: it is asked about every event (K9)."""
    connection.execute(
        "create function shorten() returns trigger language plpgsql "
        "as $$ begin new.name := coalesce(new.name, 'nobody'); return new; end $$"
    )
    connection.execute(
        "create trigger shorten before insert or update on users "
        "for each row execute function shorten()"
    )
    writer = Writer(connection)
    assert not writer.write(works(user(1, None), user(1, "b"), user(1, None))).failed
    assert rows() == [(1, "nobody", None)]
    assert writer.notes() == ["table public.users is not folded: it has a BEFORE INSERT trigger"]


def test_before_update_triggers_see_every_change(connection, rows):
    """A trigger on UPDATE is asked about every event, but not in single file (K9)."""
    connection.execute(
        "create function older() returns trigger language plpgsql "
        "as $$ begin new.age := coalesce(old.age, 0) + 1; return new; end $$"
    )
    connection.execute(
        "create trigger older before update on users for each row execute function older()"
    )
    statements = []
    connection.cursor_factory = _recording(statements)
    writer = Writer(connection)
    writer.write([work(n % 2, user(n % 2, f"v{n}")) for n in range(6)])
    assert rows() == [(0, "v4", 2), (1, "v5", 2)]
    assert statements.count("insert users") == 3
    assert writer.notes() == ["table public.users is not folded: it has a BEFORE trigger"]


def test_raised_by_a_trigger(connection, rows):
    """An exception of the user's own PL/pgSQL is the event's own (K10)."""
    connection.execute(
        "create function refuse() returns trigger language plpgsql as $$ "
        "begin if new.name = 'bad' then raise 'no'; end if; return null; end $$"
    )
    connection.execute(
        "create trigger refuse after insert on users for each row execute function refuse()"
    )
    written = Writer(connection).write(works(user(1, "a"), user(2, "bad"), user(3, "c")))
    assert failures(written) == {1: "RaiseException"}
    assert len(rows()) == 2


def test_keys_that_postgresql_alone_can_compare(connection, rows):
    """Two spellings of one row in one slice are one row (K9)."""
    connection.execute("create table u (id uuid primary key, n int4)")
    connection.execute("create table c (id char(3) primary key, n int4)")
    upserts = [
        *(
            Upsert("u", {"id": name, "n": n}, key="id")
            for n, name in enumerate(
                [str(UUID(int=10)), str(UUID(int=10)).upper(), "{" + str(UUID(int=10)) + "}"]
            )
        ),
        *(Upsert("c", {"id": name, "n": n}, key="id") for n, name in enumerate(["a", "a ", "b"])),
    ]
    assert not Writer(connection).write(works(*upserts)).failed
    assert rows("select n from u") == [(2,)]
    assert rows("select n from c order by n") == [(1,), (2,)]


def test_rows_without_a_key(connection, rows):
    """NULL is equal to nothing: each event makes a row of its own where that is allowed."""
    connection.execute("create table t (id int4 unique, n int4)")
    batch = works(
        *(Upsert("t", {"id": key, "n": n}, key="id") for n, key in enumerate([None, 1, None, 1]))
    )
    assert not Writer(connection).write(batch).failed
    assert rows("select id, n from t order by n") == [(None, 0), (None, 2), (1, 3)]


def test_partitioned_tables(connection, rows):
    """Upserts go to the partitions; a row that none takes is its event's failure."""
    connection.execute("create table p (id int4 primary key, n int4) partition by range (id)")
    connection.execute("create table p1 partition of p for values from (0) to (10)")
    upserts = [Upsert("p", {"id": key, "n": n}, key="id") for n, key in enumerate([1, 2, 1, 99])]
    written = Writer(connection).write(works(*upserts))
    assert failures(written) == {3: "CheckViolation"}
    assert rows("select * from p order by id") == [(1, 2), (2, 1)]


def test_defaults(connection, rows):
    """Columns that a row does not name get their defaults, also after a delete."""
    connection.execute(
        "create table t (id int4 primary key, n int4 default 7, "
        "twice int4 generated always as (n * 2) stored, seq int4 generated by default as identity)"
    )
    batch = works(
        Upsert("t", {"id": 1, "n": 1}, key="id"),
        Delete("t", {"id": 1}),
        Upsert("t", {"id": 1}, key="id"),
    )
    assert not Writer(connection).write(batch).failed
    assert rows("select id, n, twice from t") == [(1, 7, 14)]


# -- what is not the events' failure


def test_a_dropped_column_stops_the_pipeline(connection):
    """What was there and is gone is the deployment's failure: nothing is parked (K10)."""
    writer = Writer(connection)
    writer.write(works(user(1, "a")))
    connection.execute("alter table users drop column name")
    with pytest.raises(errors.UndefinedColumn):
        writer.write(works(user(2, "b")))
    connection.rollback()
    connection.execute("alter table users drop column name")
    writer.forget()
    with pytest.raises(errors.UndefinedColumn):
        writer.write(works(user(2, "b")))


def test_a_missing_right_stops_the_pipeline(connection):
    """A right that is missing is missing for everybody (K10)."""
    connection.execute("create role nobody_here")
    connection.execute("grant usage on schema public to nobody_here")
    connection.execute("grant select on users to nobody_here")
    connection.execute("set local role nobody_here")
    with pytest.raises(errors.InsufficientPrivilege):
        Writer(connection).write(works(user(1, "a"), user(2, "b")))
    connection.rollback()


def test_sql_that_was_understood_before_is_the_events_own(connection, rows):
    """A statement that other events run fails for one: its own failure, otherwise a stop (K10)."""
    writer = Writer(connection)
    connection.execute(
        "create function run(text) returns void language plpgsql as $$ begin execute $1; end $$"
    )
    call = "select run(%s)"
    written = writer.write(
        [
            work(1, Execute(call, ("select 1",))),
            work(2, Execute(call, ("selekt 1",))),
            work(3, user(3, "c")),
        ]
    )
    assert failures(written) == {1: "SyntaxError"}
    assert len(rows()) == 1
    with pytest.raises(errors.SyntaxError):
        writer.write([work(1, Execute("selekt 1"))])


def test_a_statement_timeout_of_one_event_is_its_own(connection, rows):
    """The event that takes too long fails alone; the others are applied (K10)."""
    connection.execute("set local statement_timeout = '1s'")
    written = Writer(connection).write(
        [work(1, user(1, "a")), work(2, Execute("select pg_sleep(60)")), work(3, user(3, "c"))]
    )
    assert failures(written) == {1: "QueryCanceled"}
    assert len(rows()) == 2


def test_a_lost_connection_is_raised(connection, database):
    """Nothing is parked because a backend died (F2)."""
    writer = Writer(connection)
    writer.write(works(user(1, "a")))
    with psycopg.connect(database, autocommit=True) as other:
        other.execute("select pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        writer.write(works(user(2, "b")))


def test_optimistic_writing_raises_the_data_error(connection):
    """Without a savepoint the caller gets the error and begins anew."""
    with pytest.raises(errors.StringDataRightTruncation):
        Writer(connection).write(works(user(1, "much too long")), optimistic=True)
    connection.rollback()


@pytest.mark.parametrize("check", [True, False])
def test_a_batch_that_was_refused_is_taken_apart_at_once(connection, rows, check):
    """The way of every live slice: without a savepoint first, then anew and with care (K8)."""
    if check:
        connection.execute("alter table users add constraint adult check (age >= 18)")
        connection.commit()
    batch = [
        work(n, user(n, "x", age=2**40 if n == 7 else 5 if check and n == 9 else 30))
        for n in range(20)
    ]
    writer = Writer(connection)
    with pytest.raises(psycopg.DataError):
        writer.write(batch, optimistic=True)
    connection.rollback()
    assert set(writer.write(batch).failed) == ({7, 9} if check else {7})
    assert len(rows()) == (18 if check else 19)


def test_several_reasons_to_be_left_out(connection, rows):
    """A mistake in the effect, a row that would be hidden, and healthy ones: each gets its due."""
    batch = [
        work("a", Insert("nowhere", {"id": 1})),
        work("b", user(1, "much too long")),
        work("c", user(1, "fine")),
        work("d", user(2, "b")),
        work("e", user(3, "c")),
    ]
    written = Writer(connection).write(batch)
    assert failures(written) == {0: "UnknownNameError", 1: "StringDataRightTruncation"}
    assert rows() == [(1, "fine", None), (2, "b", None), (3, "c", None)]


def test_two_writers_of_the_same_rows_do_not_wait_in_a_circle(connection, database):
    """Rows are locked in key order, whatever the order of the log (K16)."""
    outcomes = []

    def write(numbers):
        with psycopg.connect(database) as own:
            writer = Writer(own)
            for turn in range(20):
                outcomes.append(writer.write([work(n, user(n, f"t{turn}")) for n in numbers]))
                own.commit()

    numbers = range(400)
    threads = [Thread(target=write, args=(numbers,)), Thread(target=write, args=(numbers[::-1],))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [({}, frozenset())] * 40


# -- how it is written


def _recording(statements):
    class Recording(psycopg.Cursor):
        """Notes verb and table of every statement."""

        def execute(self, query, *args, **options):
            words = str(query).replace('"public".', "").replace('"', "").split()
            statements.append(" ".join([words[0], *words[2:3]]))
            return super().execute(query, *args, **options)

    return Recording


def test_a_slice_of_one_event_is_one_statement(connection):
    """A live slice costs one statement in one round trip with its savepoint, or it alone."""
    writer = Writer(connection)
    writer.write(works(user(1, "a")))
    statements = []
    connection.cursor_factory = _recording(statements)
    writer.write(works(user(1, "b")))
    assert [
        name for name in statements if name != "savepoint" and "sideline_writer" not in name
    ] == ["insert users"]
    statements.clear()
    writer.write(works(user(1, "c")), optimistic=True)
    assert statements == ["insert users"]


def test_repeated_keys_are_written_once(connection, rows):
    """A slice of many events of few keys is one statement for the last of each (K9)."""
    statements = []
    connection.cursor_factory = _recording(statements)
    writer = Writer(connection)
    writer.write([work(n % 10, user(n % 10, f"v{n}")) for n in range(1000)])
    assert [name for name in statements if name.startswith("insert")] == ["insert users"]
    assert [row[1] for row in rows()] == [f"v{n}" for n in range(990, 1000)]


def test_events_without_effects(connection):
    """Events that change nothing need no statement."""
    statements = []
    connection.cursor_factory = _recording(statements)
    assert Writer(connection).write([Work("k", ())]) == ({}, frozenset())
    assert Writer(connection).write([]) == ({}, frozenset())
    assert statements == []


# -- at start


def test_check_accepts_what_can_be_written(connection):
    """Nothing is said about effects that fit."""
    writer = Writer(connection)
    writer.check(user(1, "a"))
    writer.check(Delete("users", {"name": "a"}))
    writer.check(Execute("select 1"))


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        (Upsert("nowhere", {"id": 1}, key="id"), "table nowhere does not exist"),
        (Upsert("users", {"id": 1, "x": 1}, key="id"), "no column x"),
        (Upsert("users", {"id": 1}, key="id", version="v"), "version column"),
    ],
)
def test_check_refuses_what_never_could(connection, effect, message):
    """Tables and columns that do not exist are refused at start, in a sentence."""
    with pytest.raises(ConfigurationError, match=message):
        Writer(connection).check(effect)


def test_check_says_which_index_is_missing(connection):
    """The hint is the statement that would mend it; a partial index does not count."""
    connection.execute("create unique index on users (name) where age > 3")
    with pytest.raises(ConfigurationError) as caught:
        Writer(connection).check(Upsert("users", {"name": "a", "age": 1}, key=("name", "age")))
    with pytest.raises(ConfigurationError):
        Writer(connection).check(Upsert("users", {"name": "a", "age": 1}, key="name"))
    assert caught.value.hint == 'create unique index on "public"."users" ("name", "age");'
    connection.execute(caught.value.hint)
    Writer(connection).check(Upsert("users", {"name": "a", "age": 1}, key=("name", "age")))
