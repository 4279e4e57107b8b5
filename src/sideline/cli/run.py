"""`sideline run`: a thin shell over `Pipeline.start`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from sideline import loading, settings
from sideline.cli.output import Bar, Steps, console_err, json_option, print_json

if TYPE_CHECKING:
    from sideline.engine.running import Running

SHOW_SECONDS = 0.25


@click.command()
@click.argument("target", metavar="APP:NAME")
@click.option("--once", is_flag=True, help="Apply all there is now, then exit.")
@click.option(
    "--replay-only", is_flag=True, help="Read nothing new; carry out what was released, then exit."
)
@click.option("--master", metavar="URL", help="Spark master; local by default.")
@click.option(
    "--slots", type=click.IntRange(1), help="Tasks a round; cores or partitions by default."
)
@click.option("--take-over", is_flag=True, help="Replace a driver whose host is gone for good.")
@click.option("--accept-loss", is_flag=True, help="Go on where Kafka lost events.")
@click.option(
    "--wait", "wait_for_topics", is_flag=True, help="Wait for topics that do not exist yet."
)
@click.option("--override-guard", is_flag=True, help="Park whatever fails, however much it is.")
@click.option(
    "--from",
    "start",
    metavar="WHERE",
    help="Where a new pipeline starts: earliest, latest, a time, or 0:120,1:90.",
)
@click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers.")
@click.option("--database", metavar="URL", help="PostgreSQL.")
@json_option
def run(  # noqa: PLR0913 - one parameter an option
    *,
    target: str,
    once: bool,
    replay_only: bool,
    master: str | None,
    slots: int | None,
    take_over: bool,
    accept_loss: bool,
    wait_for_topics: bool,
    override_guard: bool,
    start: str | None,
    kafka: str | None,
    database: str | None,
    as_json: bool,
) -> None:
    """Run a pipeline on Spark until it is stopped.

    APP is a module or a file, NAME the pipeline in it: examples/users.py:users.
    """
    pipeline = loading.load(target)
    found = settings.load(kafka=kafka, database=database)
    from sideline.engine.positions import parse  # noqa: PLC0415 - imports confluent-kafka
    from sideline.engine.running import Running  # noqa: PLC0415 - imports pyspark

    stop = Stop()
    with Steps() as steps:
        steps(pipeline.name, "starting Spark")
        running = Running.begin(
            pipeline,
            once=once,
            replay_only=replay_only,
            settings=found,
            master=master,
            slots=slots,
            take_over=take_over,
            accept_loss=accept_loss,
            wait_for_topics=wait_for_topics,
            override_guard=override_guard,
            start=None if start is None else parse(start),
        )
        stop.attach(running.stop)
        steps.done(f"{pipeline.name} runs on Spark ({found.kafka})", of=(pipeline.name,))
        watch(running, steps, pipeline.name)
    status = running.status()
    if as_json:
        print_json(status)
        return
    console_err.print(_summary(pipeline.name, status) + ("; stopped." if stop.asked else "."))
    if status["parked"]:
        console_err.print(f"     why, and what waits: sideline parked causes {pipeline.name}")


def watch(
    running: Running,
    steps: Steps,
    name: str,
    *,
    left: Callable[[dict[str, Any]], int] | None = None,
) -> None:
    """Show what is happening until it ends; raises what ended it.

    ``left`` says how much there is still to do, where that is not the lag.
    """
    bar: Bar | None = None
    said: dict[str, str] = {}
    while not running.wait(SHOW_SECONDS):
        status = running.status()
        if bar is None and status["partitions"]:
            todo = status["lag"] if left is None else left(status)
            bar = steps.bar(name, max(1, status["consumed"] + todo))
        if bar is not None:
            bar.reach(status["consumed"])
        for what, text in status["troubles"].items():
            if said.get(what) != text:
                steps.say(f"     {what}: {text}")
        said = status["troubles"]


def _summary(name: str, status: dict[str, Any]) -> str:
    parts = [f"{status['consumed']:,} events consumed", f"{status['applied']:,} applied"]
    others = ("filtered", "skipped", "parked", "duplicate")
    parts += [f"{status[what]:,} {what}" for what in others if status[what]]
    return f"{name}: {', '.join(parts)}"


class Stop:
    """The first signal asks for an end at a slice boundary, the second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self._call: Callable[[], None] = lambda: None
        self._listen()

    def attach(self, call: Callable[[], None]) -> None:
        """What a first signal calls, now that there is something to stop."""
        # Spark, when it started, put a handler of its own there that cancels all jobs.
        self._listen()
        self._call = call
        if self.asked:
            self._call()

    def _listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = True
        console_err.print("stopping at the next slice boundary; once more to end at once")
        self._call()
