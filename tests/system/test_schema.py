"""The ledger's tables are the same, whichever way a database came to them."""

from __future__ import annotations

import psycopg
import pytest

from sideline.ledger import schema
from sideline.ledger.sql import migrations, queries
from tests.support.ledger_rows import Failed, Rows

# Everything that a migration can make, in words that hold no number of this database's own.
CATALOGUE = {
    "relations": """
        select relname, relkind, relpersistence, relreplident, relrowsecurity, relacl::text,
               reloptions, obj_description(pg_class.oid, 'pg_class')
        from pg_class
        where relnamespace = 'sideline'::regnamespace
    """,
    "columns": """
        select attrelid::regclass::text, attname, format_type(atttypid, atttypmod), attnotnull,
               attidentity, attgenerated, attstorage, attcompression, attstattarget, attoptions,
               attcollation::regcollation::text, pg_get_expr(adbin, adrelid),
               rank() over (partition by attrelid order by attnum),
               col_description(attrelid, attnum)
        from pg_attribute
        join pg_class on pg_class.oid = attrelid
        left join pg_attrdef on adrelid = attrelid and adnum = attnum
        where relnamespace = 'sideline'::regnamespace and attnum > 0 and not attisdropped
    """,
    "constraints": """
        select conrelid::regclass::text, conname, pg_get_constraintdef(oid), convalidated,
               condeferrable, condeferred
        from pg_constraint
        where connamespace = 'sideline'::regnamespace
    """,
    "indexes": """
        select indexrelid::regclass::text, pg_get_indexdef(indexrelid), indisvalid, indisready,
               indisclustered
        from pg_index
        join pg_class on pg_class.oid = indexrelid
        where relnamespace = 'sideline'::regnamespace
    """,
    "triggers": """
        select tgrelid::regclass::text, pg_get_triggerdef(pg_trigger.oid), tgenabled
        from pg_trigger
        join pg_class on pg_class.oid = tgrelid
        where relnamespace = 'sideline'::regnamespace and not tgisinternal
    """,
    "functions": """
        select proname, pg_get_functiondef(oid), proacl::text
        from pg_proc
        where pronamespace = 'sideline'::regnamespace
    """,
    "types": """
        select typname, typtype, array(
            select enumlabel::text from pg_enum where enumtypid = pg_type.oid order by enumsortorder
        )
        from pg_type
        where typnamespace = 'sideline'::regnamespace and typtype <> 'b'
    """,
    "sequences": """
        select sequencename, data_type::text, start_value, increment_by, max_value, cycle
        from pg_sequences
        where schemaname = 'sideline'
    """,
}


def catalogue(connection):
    """All that is in the schema, with what it belongs to."""
    found = {name: connection.execute(query).fetchall() for name, query in CATALOGUE.items()}
    return {name: sorted(map(repr, rows)) for name, rows in found.items()}


@pytest.fixture
def fresh(database):
    """A database whose schema is forgotten again, and what an empty one gets at once."""
    with psycopg.connect(database, autocommit=True) as connection:
        schema.migrate(connection)
        found = catalogue(connection)
        connection.execute("drop schema sideline cascade")
        yield connection, found


@pytest.mark.parametrize("filled_at", [2, 8])
def test_step_by_step_with_rows_in_it(fresh, filled_at):
    """Every version was installed in its time, events waiting: in the end all is as fresh (S1)."""
    connection, wanted = fresh
    for step in migrations():
        # Each by itself, as when a new version was installed for each.
        with connection.transaction():
            connection.execute(step.sql)
            connection.execute(
                queries()["record_migration"], {"number": step.number, "name": step.name}
            )
        if step.number == filled_at:
            rows = Rows(connection)
            rows.partition("login", "users", 2, consumed=9, applied=9, next_offset=30)
            rows.park(b"zoey", ("users", 2, 1), Failed())
            rows.park(b"zoey", ("users", 2, 5))
            rows.park(None, ("users", 0, 8), Failed())
    assert catalogue(connection) == wanted
    assert schema.version(connection) == schema.newest()
    assert connection.execute("select count(*) from sideline.events").fetchone() == (3,)


def test_the_script_for_a_dba_makes_the_same(fresh):
    """`sideline migrate --sql`, run by somebody else (S1)."""
    connection, wanted = fresh
    connection.execute(schema.script())
    assert catalogue(connection) == wanted
    assert schema.pending(connection) == ()


def test_the_catalogue_is_looked_at(fresh):
    """Each kind of thing is in it: an empty list would let everything pass."""
    _, found = fresh
    assert [name for name, rows in found.items() if not rows] == []
