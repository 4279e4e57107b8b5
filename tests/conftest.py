"""Real services for tests: started at their first use, once a run, gone when the run ends."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from hypothesis import HealthCheck, settings
from psycopg import sql

from sideline.stack import Stack, StackInfo
from tests.support.run import Run
from tests.support.waiting import patiently, wait_for

_RUN = pytest.StashKey[Run]()
_LEFT = pytest.StashKey[list[str]]()
_ADMIN_SECONDS = 30

# The machine may be busy with something else: how long an example takes says nothing about it.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # Ended from outside, a run tears its fixtures down as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Started in the background these are ignored, here and in all that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.stash[_RUN] = Run()
    config.stash[_LEFT] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """A run that leaves a process or a directory behind has failed (after all fixtures ended)."""
    left = session.config.stash[_RUN].leftovers()
    if hasattr(session.config, "workeroutput"):
        # One of several side by side: the one that started it speaks for all.
        session.config.workeroutput["left"] = left
        return
    left += session.config.stash[_LEFT]
    for item in left:
        session.config.get_terminal_writer().line(f"\nleft behind by this run: {item}")
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[_LEFT] += getattr(node, "workeroutput", {}).get("left", [])


def pytest_unconfigure(config):
    config.stash[_RUN].close()


@pytest.fixture(scope="session")
def run(pytestconfig) -> Run:
    """This test run's own directory."""
    return pytestconfig.stash[_RUN]


@pytest.fixture(scope="session")
def postgres_server(run) -> Iterator[StackInfo]:
    """A real PostgreSQL for the whole run; tests take ``database``."""
    yield from _service(run, "postgres")


@pytest.fixture(scope="session")
def kafka_server(run) -> Iterator[StackInfo]:
    """A real broker for the whole run; tests take ``kafka`` and ``topics``."""
    yield from _service(run, "kafka")


def _service(run: Run, name: str) -> Iterator[StackInfo]:
    stack = Stack(run.directory(name))
    try:
        yield stack.up(services=(name,))
    finally:
        stack.down()
        shutil.rmtree(stack.directory)


@pytest.fixture
def database(postgres_server) -> Iterator[str]:
    """The URL of an empty database of this test's own."""
    name = f"test_{uuid4().hex}"
    with psycopg.connect(postgres_server.database, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    yield postgres_server.database.rpartition("/")[0] + f"/{name}"
    with psycopg.connect(postgres_server.database, autocommit=True) as admin:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def kafka(kafka_server) -> str:
    """The bootstrap servers of a real broker."""
    return kafka_server.bootstrap


@pytest.fixture(scope="session")
def _admin(kafka) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka})


@pytest.fixture
def topics(_admin) -> Iterator[Callable[..., str]]:
    """Make topics of this test's own: ``topics(partitions=4, cleanup_policy="compact")``."""
    made: list[str] = []

    def make(partitions: int = 4, *, name: str = "topic", **config: object) -> str:
        topic = f"{name}-{uuid4().hex[:12]}"
        # Events of long ago are tests too: retention would take them, some minutes later.
        config = {"retention_ms": -1, **config}
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        _create(_admin, NewTopic(topic, partitions, 1, config=settings))
        made.append(topic)
        return topic

    yield make
    if made:
        for future in _admin.delete_topics(made, operation_timeout=_ADMIN_SECONDS).values():
            future.result()


def _create(admin: AdminClient, topic: NewTopic) -> None:
    """Create a topic and wait until every partition has a leader."""

    def make() -> None:
        try:
            admin.create_topics([topic])[topic.topic].result()
        except KafkaException as error:
            # The answer to the first try was lost.
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    patiently(make)

    def led() -> bool:
        known = patiently(lambda: admin.list_topics(topic.topic, timeout=_ADMIN_SECONDS))
        leaders = [part.leader for part in known.topics[topic.topic].partitions.values()]
        return len(leaders) == topic.num_partitions and all(leader >= 0 for leader in leaders)

    wait_for(led, what=f"leaders of {topic.topic}")


@pytest.fixture
def own_stack(run) -> Iterator[Callable[..., Stack]]:
    """Stacks that a test may damage: ``own_stack()`` is a Stack in a new directory, not up yet."""
    made: list[Stack] = []

    def make(name: str = "stack") -> Stack:
        made.append(Stack(run.directory(name) / ".sideline"))
        return made[-1]

    yield make
    for stack in made:
        stack.down()
        shutil.rmtree(stack.directory.parent)
