"""Members whose names do not always fit: a failing key steps aside, all others go on.

Needs:
    create table members (
        id text primary key, name text not null check (length(name) <= 40)
    );
"""

import logging

from sideline import Backoff, Delete, Event, FloodGuard, Pipeline, Sideline, Upsert

log = logging.getLogger("members")


class DirectoryBusyError(Exception):
    """Comes and goes, whatever the event: worth waiting for."""


failing = Pipeline(
    "members",
    topics="members",
    on_failure=Sideline(),  # the default
    recoverable=[DirectoryBusyError],
    retry=Backoff(first="100ms", limit="30s"),
    guard=FloodGuard(share=0.2, of=500, in_a_row=50),
)


@failing.handler
def keep(event: Event):
    member = event.json()
    if member is None:
        return Delete("members", {"id": event.key.decode()})
    if not member["name"].isascii():
        # Found by the event's id in the worker's log.
        log.warning("a name beyond ASCII")
        raise ValueError(f"cannot spell {member['name']!a}")
    return Upsert("members", {"id": member["id"], "name": member["name"]}, key="id")
