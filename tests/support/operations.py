"""Operations as a person's command would write them: rows, nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg

from sideline import accounting

_ALL = """
select queues.topic, queues.home, queues.id, null, null, null
from sideline.queues
where pipeline = %(pipeline)s
  and (%(keys)s::bytea[] is null or exists (
      select from sideline.keys where keys.queue = queues.id and keys.key = any(%(keys)s::bytea[])
  ))
union all
select topic, partition, null, partition, "offset", incarnation
from sideline.events
where pipeline = %(pipeline)s and state in ('parked', 'dead') and queue is null
  and %(keys)s::bytea[] is null
order by 3, 4, 5
"""
# An event goes where its queue is at home, or was.
_EVENTS = """
select events.topic, coalesce(queues.home, former.home, events.partition), null,
       events.partition, events."offset", events.incarnation
from unnest(%(partitions)s::integer[], %(offsets)s::bigint[]) as given (partition, "offset")
join sideline.events
  on events.pipeline = %(pipeline)s
 and events.partition = given.partition and events."offset" = given."offset"
left join sideline.queues on queues.id = events.queue
left join sideline.queues as former on former.id = events.former_queue
order by events.place
"""


def operate(
    database: str,
    pipeline: str,
    kind: str = "release",
    *,
    keys: Iterable[str | bytes] | None = None,
    events: Sequence[tuple[int, int]] | None = None,
    rate: float | None = None,
    stop_at: float = 0.5,
) -> int:
    """Ask for a release of everything or of some keys, or of single events; its number."""
    named: dict[str, Any] = {"pipeline": pipeline, "keys": None}
    if keys is not None:
        named["keys"] = [key.encode() if isinstance(key, str) else key for key in keys]
    if events is not None:
        named |= {"partitions": [one for one, _ in events], "offsets": [one for _, one in events]}
    with psycopg.connect(database) as connection:
        items = connection.execute(_ALL if events is None else _EVENTS, named).fetchall()
        ((number,),) = connection.execute(
            "insert into sideline.operations"
            " (pipeline, kind, selection, actor, items, events, plan, rate, stop_at)"
            " values (%s, %s, '{}', 'test', %s, 0, %s, %s, %s) returning id",
            (pipeline, kind, len(items), uuid.uuid4().hex, rate, stop_at),
        ).fetchall()
        connection.cursor().executemany(
            "insert into sideline.operation_items"
            ' (operation, number, topic, home, queue, partition, "offset", incarnation)'
            " values (%s, %s, %s, %s, %s, %s, %s, %s)",
            [(number, place, *item) for place, item in enumerate(items)],
        )
    return int(number)


def counts(database: str, operation: int) -> tuple[Any, ...]:
    """State, and events applied, failed again, discarded and restored so far."""
    with psycopg.connect(database) as connection:
        (row,) = connection.execute(
            "select state, coalesce(sum(applied), 0)::int, coalesce(sum(failed), 0)::int,"
            " coalesce(sum(discarded), 0)::int, coalesce(sum(restored), 0)::int"
            " from sideline.operations left join sideline.operation_counts on operation = id"
            " where id = %s group by id",
            (operation,),
        ).fetchall()
    return row


def states(database: str, operation: int) -> list[str]:
    """What became of the items, in their order."""
    with psycopg.connect(database) as connection:
        rows = connection.execute(
            "select case when items.state = 'waiting' and number <= seen then 'done'"
            " else items.state end"
            " from sideline.operation_items as items left join sideline.operation_counts as counts"
            " on counts.operation = items.operation and counts.topic = items.topic"
            " and counts.partition = items.home where items.operation = %s order by number",
            (operation,),
        ).fetchall()
    return [state for (state,) in rows]


def balanced(database: str) -> None:
    """The books of every pipeline balance, as `sideline status --check` would say."""
    for books in accounting.check(database):
        assert not books.differences, books.differences
