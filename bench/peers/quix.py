"""A copy by quixstreams, exactly once: as many processes of one group as there are slots.

It runs in an environment of its own, where nothing of sideline's is installed, and follows the
topic until it is ended.
"""

from __future__ import annotations

import os
import signal

from quixstreams import Application

from bench.peers import Task, task

COMMIT_RECORDS = 10_000
# What is left at the end is fewer than that: by default it would wait for five seconds.
COMMIT_SECONDS = 1.0


def main() -> None:
    """Fork one process for each slot and wait for them."""
    given = task()
    # Whoever ends them means the children, who commit what they have; this one ends after them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    children = [pid for _ in range(given.slots) if (pid := _fork(given))]
    failed = [pid for pid in children if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
    raise SystemExit(1 if failed else 0)


def _fork(given: Task) -> int:
    pid = os.fork()
    if pid == 0:
        copy(given)
        os._exit(0)
    return pid


def copy(given: Task) -> None:
    """Key and value as they are, from topic to topic."""
    app = Application(
        broker_address=given.bootstrap,
        consumer_group=given.options["group"],
        processing_guarantee="exactly-once",
        auto_offset_reset="earliest",
        commit_every=COMMIT_RECORDS,
        commit_interval=COMMIT_SECONDS,
        producer_extra_config={"linger.ms": 5, "queue.buffering.max.messages": 500_000},
        state_dir=f"{given.workdir}/state-{os.getpid()}",
        auto_create_topics=False,
        use_changelog_topics=False,
        loglevel="WARNING",
    )
    records = app.topic(given.topic, key_deserializer="bytes", value_deserializer="bytes")
    copies = app.topic(given.options["to"], key_serializer="bytes", value_serializer="bytes")
    app.dataframe(records).to_topic(copies)
    app.run()


if __name__ == "__main__":
    main()
