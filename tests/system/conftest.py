"""One Spark session for the whole run, and commands that end with their test."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest
from confluent_kafka.admin import NewTopic

from sideline.errors import SidelineError
from tests.conftest import _create
from tests.support.desk import Desk
from tests.support.ground import grounds, nursery
from tests.support.ledger_rows import cli, read, rows
from tests.support.pipelines import APPLIED, Command, execute, settings

__all__ = ["cli", "grounds", "nursery", "read", "rows"]


@pytest.fixture(scope="session")
def spark():
    """A session as `sideline run` builds it, with Kafka's connector and room for two rounds."""
    from pyspark import SparkContext

    from sideline.spark import session

    interrupt = signal.getsignal(signal.SIGINT)
    built = session(slots=2, name="sideline tests")
    # Spark puts its own handler there, which would not tear fixtures down.
    signal.signal(signal.SIGINT, interrupt)
    yield built
    built.stop()
    gateway = SparkContext._gateway
    gateway.shutdown()
    # The JVM ends with its standard input.
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=120)
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def create_topic(_admin) -> Callable[[NewTopic], None]:
    """Make a topic by its exact name; whoever made it deletes it.

    The controller answers before the broker knows the topic: that is waited for.
    """
    return partial(_create, _admin)


@pytest.fixture
def ready(database, kafka):
    """Settings of a database with the table ``applied``, and of the broker."""
    execute(database, APPLIED)
    return settings(kafka, database)


@pytest.fixture
def start(spark, ready):
    """Start pipelines in the shared session; what still runs is stopped with the test."""
    started = []

    def begin(pipeline, **options):
        running = pipeline.start(spark, **{"settings": ready} | options)
        started.append(running)
        return running

    yield begin
    for running in started:
        running.stop()
    for running in started:
        # How it ended is the test's concern; that it ended is ours.
        with suppress(SidelineError):
            assert running.wait(60), "a pipeline did not stop"


@pytest.fixture
def finish(start) -> Callable[..., dict[str, object]]:
    """Run a pipeline once, to its end; its last status."""

    def run(pipeline, **options):
        running = start(pipeline, once=True, **options)
        assert running.wait(120), f"not done: {running.status()}"
        return running.status()

    return run


@pytest.fixture
def command(tmp_path_factory, kafka, request) -> Iterator[Callable[..., Command]]:
    """Run `sideline` with the test's broker and database; it ends with the test."""
    started: list[Command] = []

    def start(*arguments: str, **environment: str) -> Command:
        given = {"SIDELINE_KAFKA": kafka}
        if "database" in request.fixturenames:
            given["SIDELINE_DATABASE"] = request.getfixturevalue("database")
        folder = tmp_path_factory.mktemp("command")
        started.append(Command(arguments, folder, **given | environment))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def desk(database, kafka) -> Iterator[Callable[..., Desk]]:
    """Start drivers without Spark; they end with the test."""
    made: list[Desk] = []

    def start(pipeline, work=None, **options) -> Desk:
        made.append(Desk(database, kafka, pipeline, work, **options))
        return made[-1].begun()

    yield start
    for one in made:
        one.stop()
