"""`sideline demo`: from an empty machine to a table that equals its source, in one go."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from sideline.cli import story
from sideline.cli.output import Steps, json_option, print_json, print_table
from sideline.errors import CheckError, KafkaUnreachableError, is_interrupt
from sideline.settings import STACK_DIRECTORY, Settings

if TYPE_CHECKING:
    from sideline.cli.story import Fact
    from sideline.stack import StackInfo

PARTITIONS = 4
USERS = 2_000
EVENTS = 20_000
# Small enough to watch, large enough to be a story.
SHOWN_USERS = 5
LOOK_SECONDS = 0.1
KAFKA_SECONDS = 30.0
STDERR = 2
# The lines that show how the stack comes up; they go when it is up.
STACK_STEPS = ("stack", "jars", "java", "kafka")
NEXT = "try it yourself: sideline stack up, then docs/first-pipeline.md"


@click.command()
@click.option(
    "--users", type=click.IntRange(20), default=USERS, show_default=True, help="How many sign up."
)
@click.option(
    "--events", type=click.IntRange(60), default=EVENTS, show_default=True, help="How many happen."
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(STACK_DIRECTORY, "demo"),
    show_default=f"./{STACK_DIRECTORY}/demo",
    help="Where Kafka and PostgreSQL live meanwhile; emptied before, deleted afterwards.",
)
@json_option
def demo(*, users: int, events: int, directory: Path, as_json: bool) -> None:
    """Zoey, Zoë and Zoiee: the story, on an embedded stack, in one go.

    Starts Kafka and PostgreSQL on this machine, publishes what happens to some users, applies
    it with Spark, compares the table with its source, and stops what it started.
    """
    facts = story.tell(users, max(events, users + 3))
    with _log(directory) as console, Steps(console) as steps:
        steps.say("sideline demo: Zoey, Zoë and Zoiee")
        interrupt = Interrupt()
        with _stack(directory, steps, interrupt) as found:
            _publish(facts, found, steps)
            interrupt.check()
            _prepare(found)
            interrupt.check()
            consumed = _run(len(facts), found, steps, interrupt)
            table = _table(found)
            interrupt.check()
    differences = _differences(table, story.ending(facts))
    if as_json:
        print_json(_summary(facts, table, consumed, differences))
    else:
        _show(facts, table, differences)
    if differences:
        message = f"the table differs from its source for {len(differences)} users."
        raise CheckError(message, hint=f"Among them: {', '.join(sorted(differences)[:5])}.")


@contextlib.contextmanager
def _log(directory: Path) -> Iterator[Console]:
    """A console of our own; what Java and librdkafka say on stderr meanwhile goes to a file.

    The file stays where something failed, and goes otherwise.
    """
    from sideline.stack import faults  # noqa: PLC0415 - --help stays quick

    path = directory.absolute().with_suffix(".log")
    with faults.explained("create", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    screen = os.dup(STDERR)
    os.dup2(log, STDERR)
    os.close(log)
    failed = False
    with os.fdopen(screen, "w", encoding="utf-8") as stream:
        try:
            yield Console(file=stream, highlight=False)
        except Exception as error:
            failed = not is_interrupt(error)
            if failed:
                print(f"What Java said is in {path}.", file=stream)
            raise
        finally:
            os.dup2(screen, STDERR)
            if not failed:
                _remove(path)


class Interrupt:
    """Ctrl-C that is not forgotten where it is swallowed: in a destructor, in a callback."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self, _number: int, _frame: object) -> None:
        """Handle the signal."""
        self._asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Be interrupted now, if it was asked for before."""
        if self._asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _stack(directory: Path, steps: Steps, interrupt: Interrupt) -> Iterator[Settings]:
    """Kafka and PostgreSQL for the time of the story, also when it is cut short.

    Their logs stay where something failed; otherwise everything goes.
    """
    from sideline.stack import Stack  # noqa: PLC0415 - --help stays quick

    stack = Stack(directory)
    failed = False
    with _signals(interrupt):
        try:
            info = stack.up(fresh=True, progress=steps)
            steps.done(_versions(info), of=STACK_STEPS + tuple(each.name for each in info.services))
            yield Settings(kafka=info.bootstrap, database=info.database)
        except Exception as error:
            failed = not is_interrupt(error)
            raise
        finally:
            # Whatever is pressed meanwhile: nothing may be left running.
            with _signals(signal.SIG_IGN):
                steps("stack", "stopping Kafka and PostgreSQL")
                stack.down()
                if not failed:
                    _remove(stack.directory)


def _versions(info: StackInfo) -> str:
    cores = os.cpu_count() or 1
    return (
        f"Kafka {info.versions['kafka']}, PostgreSQL {info.versions['postgres']}, "
        f"Spark {version('pyspark')} on {cores} core{'s' if cores > 1 else ''}"
    )


def _remove(path: Path) -> None:
    """Delete what was ours, and the directory around it if nobody else uses it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


@contextlib.contextmanager
def _signals(handler: Any) -> Iterator[None]:  # noqa: ANN401 - whatever signal takes
    """What Ctrl-C, a SIGTERM and a closed terminal do meanwhile."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _publish(facts: list[Fact], found: Settings, steps: Steps) -> None:
    """Create the topic and send every fact, keyed by its user."""
    from confluent_kafka import KafkaException, Producer  # noqa: PLC0415 - --help stays quick
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415
    from confluent_kafka.cimpl import NewTopic  # noqa: PLC0415 - admin has it, but untyped

    bar = steps.bar("publish", len(facts))

    def delivered(error: object, _message: object) -> None:
        if error is not None:
            raise KafkaUnreachableError(f"the broker did not take an event: {error}.")
        bar.advance(1)

    try:
        admin = AdminClient(found.kafka_client())
        topic = NewTopic(story.TOPIC, num_partitions=PARTITIONS, replication_factor=1)
        admin.create_topics([topic])[story.TOPIC].result(KAFKA_SECONDS)
        producer = Producer(found.kafka_client(**{"enable.idempotence": True, "linger.ms": 20}))
        for fact in facts:
            producer.produce(story.TOPIC, fact.value, key=fact.user, on_delivery=delivered)
            producer.poll(0)
        left = producer.flush(KAFKA_SECONDS)
    except KafkaException as error:
        raise KafkaUnreachableError(f"the broker refused: {error}.") from error
    if left:
        raise KafkaUnreachableError(f"{left:,} events were not taken within {KAFKA_SECONDS:.0f} s.")
    users = len({fact.user for fact in facts})
    bar.close(
        f"{len(facts):,} events of {users:,} users published to '{story.TOPIC}' "
        f"({PARTITIONS} partitions), {bar.rate:,.0f}/s"
    )


def _prepare(found: Settings) -> None:
    """Create the user's own table; sideline never does."""
    import psycopg  # noqa: PLC0415 - --help stays quick

    with psycopg.connect(found.require_database(), autocommit=True) as connection:
        connection.execute(story.TABLE)


def _run(events: int, found: Settings, steps: Steps, interrupt: Interrupt) -> int:
    """Apply everything with Spark; how many events were consumed."""
    steps("Spark", "starting")
    from sideline.engine.running import Running  # noqa: PLC0415 - imports pyspark

    name = story.users.name
    running = Running.begin(story.users, once=True, settings=found)
    try:
        interrupt.check()
        steps.done(f"pipeline '{name}' runs on Spark", of=("Spark",))
        bar = steps.bar(f"run {name}", events)
        while not running.wait(LOOK_SECONDS):
            interrupt.check()
            bar.reach(running.status()["consumed"])
    finally:
        if running.is_alive:
            running.stop()
            running.wait(KAFKA_SECONDS)
    consumed: int = running.status()["consumed"]
    bar.reach(consumed)
    bar.close(f"{consumed:,} events applied in order, exactly once, {bar.rate:,.0f}/s")
    return consumed


def _table(found: Settings) -> dict[str, str]:
    """What is in the table now."""
    import psycopg  # noqa: PLC0415 - --help stays quick

    with psycopg.connect(found.require_database()) as connection:
        return dict(connection.execute("select id, name from users").fetchall())


def _differences(table: dict[str, str], source: dict[str, str]) -> set[str]:
    """Users whose name in the table is not the source's last."""
    return {user for user in table.keys() | source.keys() if table.get(user) != source.get(user)}


def _show(facts: list[Fact], table: dict[str, str], differences: set[str]) -> None:
    heroine = story.HEROINE
    others = [user for user in sorted(table, key=_number) if user != heroine][: SHOWN_USERS - 1]
    rows = [(user, _history(facts, user), table.get(user, "(gone)")) for user in (heroine, *others)]
    print_table(("user", "names in the topic", "name in the table"), rows)
    total = len({fact.user for fact in facts})
    steps = Steps()
    steps.done(
        f"{heroine} reads {table.get(heroine)!r}. The table equals the source "
        f"for {total - len(differences):,} of {total:,} users."
    )
    steps.say(f" {NEXT}")


def _history(facts: list[Fact], user: str) -> str:
    names = [fact.name or "(left)" for fact in facts if fact.user == user]
    shown = names if len(names) <= len(story.HER_NAMES) else [names[0], "...", *names[-2:]]
    return ", ".join(shown)


def _number(user: str) -> int:
    return int(user.rpartition("-")[2])


def _summary(
    facts: list[Fact], table: dict[str, str], consumed: int, differences: set[str]
) -> dict[str, Any]:
    return {
        "published": len(facts),
        "consumed": consumed,
        "users": len(table),
        "different": len(differences),
        story.HEROINE: table.get(story.HEROINE),
    }
