"""What a slice of copies reads of the ledger, while very many events wait for their turn."""

from __future__ import annotations

import pytest

from sideline import arrays
from sideline.ledger.sql import queries
from tests.support.ledger_rows import Rows
from tests.support.watched import Watched

WAITING = 50_000
SOME = range(0, WAITING, WAITING // 500)
FLOOD = """
insert into sideline.events (
    pipeline, topic, partition, "offset", state, why, timestamp_ms, stage, error, message,
    traceback, fingerprint, handler_version, attempts, copy_topic, due_at
)
select 'login', 'users', 0, given, %(state)s, 'failed', 0, 'handler', 'ValueError', 'no',
       '', '0123456789ab', '1', 1, 'users.login.retry.1', now()
from generate_series(%(first)s, %(last)s - 1) as given
"""
# Of each statement, what else it wants to know.
STATEMENTS = {
    "find_copied": {},
    "claim_copied": {},
    "claim_for_good": {"copy_partition": 0, "copy_offsets": arrays.numbers(list(SOME))},
    "resolve_copied": {},
}


@pytest.fixture
def flooded(rows) -> Rows:
    """A ledger whose statistics are of a time at which hardly anything waited."""
    rows.connection.execute("alter table sideline.events set (autovacuum_enabled = off)")
    rows.partition("login", "users", 0)
    before = {"first": WAITING, "last": WAITING + 10_000, "state": "dead"}
    rows.connection.execute(FLOOD, before)
    rows.commit()
    rows.connection.execute("analyze sideline.events")
    rows.connection.execute(FLOOD, {"first": 0, "last": WAITING, "state": "retrying"})
    rows.commit()
    return rows


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_slice_of_copies_reads_its_own_events_only(flooded, name):
    """However many wait beside them, and whatever the planner believes of that (F8)."""
    watched = Watched(flooded.connection)
    watched.look(
        queries()[name],
        {
            "pipeline": "login",
            "copy_topic": "users.login.retry.1",
            "topics": arrays.texts(["users"] * len(SOME)),
            "partitions": arrays.numbers([0] * len(SOME)),
            "offsets": arrays.numbers(list(SOME)),
            "incarnations": arrays.numbers([0] * len(SOME)),
            "attempts": arrays.numbers([1] * len(SOME)),
            **STATEMENTS[name],
        },
    )
    assert watched.costly == []
    assert watched.found == len(SOME)
