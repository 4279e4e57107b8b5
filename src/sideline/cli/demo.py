"""`sideline demo`: from an empty machine to a table that equals its source, in one go."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console

from sideline import showing
from sideline.cli import story
from sideline.cli.output import Steps, json_option, print_json, print_table
from sideline.errors import CheckError, KafkaUnreachableError, is_interrupt
from sideline.settings import STACK_DIRECTORY, Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sideline.cli.story import Fact
    from sideline.engine.running import Running
    from sideline.stack import StackInfo

PARTITIONS = 4
USERS = 2_000
EVENTS = 20_000
# Small enough to watch, large enough to be a story.
SHOWN_USERS = 5
CAUSE_CHARACTERS = 80
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

    Starts Kafka and PostgreSQL on this machine, publishes what happens to some users, and applies
    it with Spark, by a handler that cannot write 'ë': those keys step aside. Then the handler is
    mended, what waited is released, the table is compared with its source, and everything that
    was started is stopped.
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
            told = _tell(facts, found, steps, interrupt)
            interrupt.check()
    if as_json:
        print_json(told.summary())
    else:
        _show(told)
    told.check()


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


class Told(NamedTuple):
    """How the story went."""

    facts: list[Fact]
    consumed: int
    parked: int
    keys: int
    middle: dict[str, str]
    """The table while some were aside."""
    released: list[dict[str, Any]]
    """What was released, step by step."""
    table: dict[str, str]
    waiting: int
    """What is still parked at the end."""
    books: list[str]
    """Where the books do not balance."""

    @property
    def differences(self) -> set[str]:
        """Users whose name in the table is not the source's last."""
        return _differences(self.table, story.ending(self.facts))

    def check(self) -> None:
        """Refuse a story that does not end well."""
        found = self.differences
        if found:
            message = f"the table differs from its source for {len(found)} users."
            raise CheckError(message, hint=f"Among them: {', '.join(sorted(found)[:5])}.")
        if self.waiting or self.books:
            what = self.books[0] if self.books else f"{self.waiting} events are parked"
            raise CheckError(f"the books do not balance: {what}.")

    def summary(self) -> dict[str, Any]:
        """For programs."""
        return {
            "published": len(self.facts),
            "consumed": self.consumed,
            "parked": self.parked,
            "keys": self.keys,
            "released": self.released,
            "still_parked": self.waiting,
            "books_balance": not self.books,
            "users": len(self.table),
            "different": len(self.differences),
            "before": {story.HEROINE: self.middle.get(story.HEROINE)},
            story.HEROINE: self.table.get(story.HEROINE),
        }


def _tell(facts: list[Fact], found: Settings, steps: Steps, interrupt: Interrupt) -> Told:
    """Version 1, what it could not do, the fix, and the way back."""
    from sideline.accounting import check  # noqa: PLC0415 - imports psycopg

    name, database = story.users.name, found.require_database()
    steps("Spark", "starting")
    with _spark(interrupt) as spark:
        steps.done("Spark is there", of=("Spark",))
        consumed = _run_first(len(facts), found, spark, steps, interrupt)
        middle = _table(found)
        parked, keys = _say_parked(facts, middle, found, steps)
        released = _release_all(found, spark, steps, interrupt)
    table = _table(found)
    (books,) = check(database, name)
    waiting = sum(account.parked for account in books.partitions)
    differ = [difference.message for difference in books.differences]
    return Told(facts, consumed, parked, keys, middle, released, table, waiting, differ)


@contextlib.contextmanager
def _spark(interrupt: Interrupt) -> Iterator[SparkSession]:
    """One session for both versions."""
    from sideline.engine import session  # noqa: PLC0415 - imports pyspark

    width = min(os.cpu_count() or 1, PARTITIONS)
    spark = session.build(width, name="sideline demo")
    try:
        # Spark, when it started, put a handler of its own there.
        with _signals(interrupt):
            interrupt.check()
            yield spark
    finally:
        spark.stop()


def _run_first(
    events: int,
    found: Settings,
    spark: SparkSession,
    steps: Steps,
    interrupt: Interrupt,
) -> int:
    """Everything there is, by version 1; how many events were consumed."""
    from sideline.engine.running import Running  # noqa: PLC0415 - imports pyspark

    running = Running.begin(story.before, spark, once=True, settings=found)
    bar = steps.bar(f"run {story.before.name} (version 1 cannot write 'ë')", events)
    with _ended(running):
        while not running.wait(LOOK_SECONDS):
            interrupt.check()
            bar.reach(running.status()["consumed"])
    status = running.status()
    consumed: int = status["consumed"]
    bar.reach(consumed)
    bar.close(
        f"{consumed:,} events, by version 1 of the handler, which cannot write 'ë': "
        f"{status['applied']:,} applied, {status['parked']:,} parked, {bar.rate:,.0f}/s"
    )
    return consumed


def _say_parked(
    facts: list[Fact], table: dict[str, str], found: Settings, steps: Steps
) -> tuple[int, int]:
    """What waits and why, in the ledger's own words; events and keys."""
    from sideline.ledger.reading import opened, waiting  # noqa: PLC0415 - imports psycopg
    from sideline.parked import causes  # noqa: PLC0415
    from sideline.views import Wanted  # noqa: PLC0415

    name = story.users.name
    with opened(found.require_database(), role="demo") as connection:
        parked, keys = waiting(connection, name)[name]
        (cause,) = causes(connection, Wanted(name), limit=1).rows
    heroine, source = story.HEROINE, story.ending(facts)
    right = len({fact.user for fact in facts}) - len(_differences(table, source))
    steps.say(f"     cause: {cause.error}: {showing.short(cause.message, CAUSE_CHARACTERS)}")
    steps.say(
        f"     {cause.parked:,} events failed, {parked - cause.parked:,} wait behind them; "
        f"{keys:,} keys are aside"
    )
    steps.say(
        f"     {heroine} reads {table.get(heroine)!r}; Zoë and Zoiee wait. "
        f"{right:,} other users are up to date."
    )
    return parked, keys


def _release_all(
    found: Settings,
    spark: SparkSession,
    steps: Steps,
    interrupt: Interrupt,
) -> list[dict[str, Any]]:
    """Version 2 runs; one key is released to try, then ten, then all."""
    from sideline.engine.running import Running  # noqa: PLC0415 - imports pyspark

    running = Running.begin(story.users, spark, settings=found)
    with _ended(running):
        steps.done("fix deployed: version 2 runs")
        done = [_release(first, found, steps, interrupt, running) for first in (1, 10, None)]
        running.stop()
        while not running.wait(LOOK_SECONDS):
            interrupt.check()
    return [one for one in done if one]


def _release(
    first: int | None, found: Settings, steps: Steps, interrupt: Interrupt, running: Running
) -> dict[str, Any]:
    import psycopg  # noqa: PLC0415

    from sideline import operations  # noqa: PLC0415 - imports psycopg
    from sideline.ledger.audit import actor  # noqa: PLC0415
    from sideline.ledger.connection import reach  # noqa: PLC0415
    from sideline.selections import Selection  # noqa: PLC0415

    selection = Selection("release", story.users.name, first=first)
    with reach(found.require_database(), role="demo") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        plan = operations.plan(connection, selection)
        numbers = operations.execute(connection, plan, actor=actor(), reason="the fix is deployed")
        if not numbers:
            return {}
        bar = steps.bar(f"release {plan.keys:,} keys", plan.events)
        while True:
            operation = operations.find(connection, numbers[0])
            connection.rollback()
            bar.reach(operation.done)
            if operation.is_over or running.wait(LOOK_SECONDS):
                break
            interrupt.check()
    keys = "1 key" if plan.keys == 1 else f"{plan.keys:,} keys"
    again = f", {operation.failed:,} failed again" if operation.failed else ", in order"
    bar.close(f"{keys} released: {operation.applied:,} of {plan.events:,} events applied{again}")
    return {
        "operation": operation.id,
        "keys": plan.keys,
        "events": plan.events,
        "applied": operation.applied,
        "failed": operation.failed,
        "state": operation.state,
    }


@contextlib.contextmanager
def _ended(running: Running) -> Iterator[None]:
    """Whatever happens, the pipeline ends before its session does."""
    try:
        yield
    finally:
        if running.is_alive:
            running.stop()
            running.wait(KAFKA_SECONDS)


def _table(found: Settings) -> dict[str, str]:
    """What is in the table now."""
    import psycopg  # noqa: PLC0415 - --help stays quick

    with psycopg.connect(found.require_database()) as connection:
        return dict(connection.execute("select id, name from users").fetchall())


def _differences(table: dict[str, str], source: dict[str, str]) -> set[str]:
    """Users whose name in the table is not the source's last."""
    return {user for user in table.keys() | source.keys() if table.get(user) != source.get(user)}


def _show(told: Told) -> None:
    heroine, facts = story.HEROINE, told.facts
    aside = story.troubled(facts) - {heroine}
    others = sorted(aside & told.table.keys(), key=_number)[: SHOWN_USERS - 1]
    rows = [
        (
            user,
            _history(facts, user),
            told.middle.get(user, "(none)"),
            told.table.get(user, "(gone)"),
        )
        for user in (heroine, *others)
    ]
    print_table(("user", "names in the topic", "while aside", "now"), rows)
    total = len({fact.user for fact in facts})
    right = total - len(told.differences)
    steps = Steps()
    if not told.books and not told.waiting:
        steps.done(f"all {told.consumed:,} events are applied, nothing waits, the books balance")
    steps.done(
        f"{heroine} reads {told.table.get(heroine)!r}. The table equals the source "
        f"for {right:,} of {total:,} users."
    )
    steps.say(f" {NEXT}")


def _history(facts: list[Fact], user: str) -> str:
    names = [fact.name or "(left)" for fact in facts if fact.user == user]
    shown = names if len(names) <= len(story.HER_NAMES) else [names[0], "...", *names[-2:]]
    return ", ".join(shown)


def _number(user: str) -> int:
    return int(user.rpartition("-")[2])
