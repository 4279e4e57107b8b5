"""What a pipeline costs that has nothing to do: CPU of its processes, PostgreSQL and the broker."""

from __future__ import annotations

import time
from collections.abc import Callable

from bench import contest
from bench.peers import PEERS, Task
from bench.sender import send_first
from bench.services import USERS
from bench.suites import Bench, Finding, Outcome

PARTITIONS = 4
# Of one core, all processes of the pipeline together.
AIM_PERCENT = 5.0


def run(bench: Bench) -> Outcome:
    """Let it apply one event a partition, rest, and count."""
    seconds = bench.settings.idle_seconds
    with (
        bench.empty_topic("idle", PARTITIONS) as topic,
        bench.services.fresh_database(USERS) as database,
        bench.narrator.bar(f"nothing to do, {seconds:g} seconds", int(seconds)) as done,
    ):
        task = Task(bench.services.bootstrap, database, topic, PARTITIONS)
        with contest.started(PEERS["sideline"], task) as contestant:
            send_first(task.bootstrap, topic, PARTITIONS)
            next(contestant.commits())
            _pass(bench.settings.idle_warm_seconds)
            before, begun = bench.services.cpu(contestant.process.pid), time.monotonic()
            _pass(seconds, done)
            used = bench.services.cpu(contestant.process.pid).since(before)
            lasted = time.monotonic() - begun
    shares = {
        "the pipeline's processes": used.contestant,
        "PostgreSQL": used.postgres,
        "the broker": used.broker,
    }
    rows = [{"what": what, "percent": 100 * cpu / lasted} for what, cpu in shares.items()]
    own = 100 * used.contestant / lasted
    findings = [
        Finding("an idle pipeline, of one core", own, AIM_PERCENT, at_least=False, unit=" %")
    ]
    return Outcome("idle", "Nothing to do: CPU, in percent of one core", rows, findings)


def _pass(seconds: float, done: Callable[[int], None] = lambda _: None) -> None:
    """Let time pass, as it does for an idle pipeline."""
    begun = time.monotonic()
    while (gone := time.monotonic() - begun) < seconds:
        time.sleep(min(1.0, seconds - gone))
        done(int(time.monotonic() - begun))
