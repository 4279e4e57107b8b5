"""The contestants: each a program of its own that is told its task and says what it commits."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

# Every contestant that chooses for itself folds and commits this many events at a time.
TRANSACTION_EVENTS = 25_000
# Two workers of whatever kind: two processes, two Spark slots, two slots of ours.
SLOTS = 2
# How long the handlers of the slow suite wait for something outside.
WAIT_SECONDS = 0.005

UPSERT = """
insert into users (id, name, email, seq)
select id, name, email, seq
from {stage}
on conflict (id) do update
set name = excluded.name, email = excluded.email, seq = excluded.seq
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What a contestant is asked to do.

    ``events``: read so many from the beginning and end; None: follow the topic until SIGTERM.
    """

    bootstrap: str
    database: str
    topic: str
    partitions: int
    events: int | None = None
    workdir: str = ""
    slots: int = SLOTS
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def dump(self) -> str:
        """As text, for an environment variable."""
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A contestant: its name, how it is started, and how its commits are seen.

    ``commits``: "reports" are lines on its standard output; "progress" means that it keeps
    its progress in the database, "offsets" that it commits those of the group that its task
    names: both are read from outside.
    ``share``: how much of a topic it reads; slow ones show their rate with less.
    """

    name: str
    title: str
    command: Callable[[Task], list[str]]
    commits: Literal["reports", "progress", "offsets"] = "reports"
    share: float = 1.0
    # Whether it needs bench/requirements.txt.
    needs_packages: bool = False


TASK_VARIABLE = "BENCH_TASK"


def task() -> Task:
    """The task of this process."""
    return Task(**json.loads(os.environ[TASK_VARIABLE]))


def report(events: int) -> None:
    """Say that so many more events are committed now.

    The clock is the machine's monotonic one, which all processes share. One short write is
    never torn by another process on the same pipe.
    """
    line = f"{time.monotonic():.6f} {events}\n"
    os.write(sys.stdout.fileno(), line.encode())


def module(name: str) -> Callable[[Task], list[str]]:
    """How a contestant of this package is started."""
    return lambda _task: [sys.executable, "-m", f"bench.peers.{name}"]


def _sideline(task: Task) -> list[str]:
    program = str(Path(sys.executable).with_name("sideline"))
    # Where retries are waited for the topic is followed until somebody ends it; the stream that it
    # is compared with is read in the same way.
    follows = task.events is None or task.options.get("pipeline") == "retried"
    once = [] if follows else ["--once"]
    return [program, "run", f"bench/app.py:{task.options.get('pipeline', 'users')}", *once]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("sideline", "sideline", _sideline, commits="progress"),
        Peer("bare", "two bare processes", module("bare")),
        Peer(
            "mapInArrow",
            "mapInArrow and COPY by hand",
            module("map_in_arrow"),
            needs_packages=True,
        ),
        Peer("foreachBatch", "foreachBatch, tuned JDBC merge", module("foreach_batch")),
        Peer(
            "foreachPartition",
            "foreachPartition, executemany",
            module("foreach_partition"),
            share=0.2,
        ),
    )
}
