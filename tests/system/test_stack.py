"""The embedded stack itself: real Kafka, real PostgreSQL, and everything that befalls them (E2)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from sideline.errors import RefusedError, StackError
from sideline.stack import Stack, StackInfo, current
from sideline.stack.processes import Identity
from sideline.stack.state import Service, load, save
from tests.support.waiting import wait_for

DATABASE_ONLY = ("postgres",)
MB = 1 << 20


@pytest.fixture(scope="module")
def shared(run):
    """One whole stack for the tests that do no damage to it."""
    stack = Stack(run.directory("shared") / ".sideline")
    stack.up()
    yield stack
    stack.up()
    stack.down()
    subprocess.run(["rm", "-r", stack.directory.parent], check=True)


def _publish(info: StackInfo, topic: str, value: str) -> None:
    admin = AdminClient({"bootstrap.servers": info.bootstrap})
    if topic not in admin.list_topics(timeout=30).topics:
        admin.create_topics([NewTopic(topic, 1)])[topic].result(30)
    producer = Producer({"bootstrap.servers": info.bootstrap, "acks": "all"})
    lost = []
    producer.produce(topic, value, on_delivery=lambda error, _: error and lost.append(error))
    # A broker that was killed is missed after its session, and then others are chosen.
    assert producer.flush(120) == 0
    assert not lost


def _read(info: StackInfo, topic: str, count: int) -> list[str]:
    consumer = Consumer(
        {"bootstrap.servers": info.bootstrap, "group.id": "g", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    try:
        found: list[str] = []

        def enough() -> bool:
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                found.append(message.value().decode())
            return len(found) >= count

        wait_for(enough, what=f"{count} events of {topic}", within_seconds=120)
        return found
    finally:
        consumer.close()


def _execute(info: StackInfo, statement: str) -> list[tuple]:
    with psycopg.connect(info.database, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def _said(stack: Stack, **options) -> tuple[StackInfo, list[str]]:
    lines: list[str] = []
    info = stack.up(progress=lambda what, text: lines.append(f"{what}: {text}"), **options)
    return info, lines


def _kill(service: Service) -> None:
    os.kill(service.process.pid, signal.SIGKILL)
    wait_for(lambda: not service.alive, what=f"the end of {service.name}")


def _status(stack: Stack) -> StackInfo:
    info = stack.status()
    assert info is not None
    return info


def test_up_again_is_harmless(shared):
    """A second `up` finds everything running and changes nothing (E2)."""
    before = shared.up()
    again, said = _said(shared)
    assert again == before
    assert said == []
    assert current(shared.directory) == before


def test_data_survive_down_and_up(shared):
    """Events and rows are there again, at the same addresses (E2)."""
    before = shared.up()
    _publish(before, "survivors", "one")
    _execute(before, "create table survivors as select 1 as id")
    assert shared.down()
    assert shared.status() is None
    assert current(shared.directory) is None
    after = shared.up()
    assert (after.bootstrap, after.database) == (before.bootstrap, before.database)
    _publish(after, "survivors", "two")
    assert _read(after, "survivors", 2) == ["one", "two"]
    assert _execute(after, "select id from survivors") == [(1,)]


def test_a_killed_broker_is_noticed_and_started_again(shared):
    """A dead broker is told from a living database, and `up` starts only what is missing (E2)."""
    info = shared.up()
    _publish(info, "killed", "one")
    broker, database = info.services
    _kill(broker)
    found = _status(shared)
    assert not found.up
    assert [service.name for service in found.dead] == ["kafka-1"]
    assert "kafka-1 is not running any more" in found.problem(broker).message
    assert current(shared.directory) is None
    again, said = _said(shared)
    assert f"kafka-1: was not running any more (pid {broker.process.pid})" in said
    assert again.pids["postgres"] == database.process.pid
    assert _read(again, "killed", 1) == ["one"]


def test_both_services_are_small(shared):
    """At rest the broker takes at most 400 MB and PostgreSQL at most 150 MB (E2)."""
    info = shared.up()
    assert _resident(info.pids["kafka-1"]) < 400 * MB
    server = info.pids["postgres"]
    together = _resident(server)
    for child in _children(server):
        # A session or a worker may have ended meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            together += _resident(child)
    assert together < 150 * MB


def _resident(pid: int) -> int:
    """What the process holds in memory; pages that it shares count by their share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for each in threads for child in (each / "children").read_text().split()]


def test_nothing_listens_beyond_loopback(shared):
    """Every socket that the services listen on is bound to 127.0.0.1 (E2)."""
    info = shared.up()
    for pid in info.pids.values():
        addresses = _listening(pid)
        assert addresses, pid
        assert all(address in LOOPBACK for address in addresses), addresses


# As the kernel writes 127.0.0.1, and the same inside IPv6.
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")


def _listening(pid: int) -> list[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # Files and connections are closed while they are looked at.
        with suppress(FileNotFoundError):
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def test_the_password_is_for_its_owner_only(shared):
    """The file is 0600, a wrong password is refused, and the address without it works (E2)."""
    info = shared.up()
    secret = shared.directory / "postgres" / "pgpass"
    assert secret.stat().st_mode & 0o777 == 0o600
    password = secret.read_text().strip().rpartition(":")[2]
    with pytest.raises(psycopg.OperationalError, match="authentication failed"):
        psycopg.connect(info.database.replace(password, "wrong"))
    with psycopg.connect(info.database_address) as connection:
        assert connection.execute("show fsync").fetchone() == ("on",)
        assert connection.execute("show server_encoding").fetchone() == ("UTF8",)
    for log in shared.directory.glob("*.log*"):
        assert password not in log.read_text()


def test_a_database_that_was_killed_comes_back_with_its_rows(own_stack):
    """After SIGKILL the next `up` recovers every committed row (E2, C3)."""
    stack = own_stack()
    info = stack.up(services=DATABASE_ONLY)
    _execute(info, "create table kept as select generate_series(1, 1000) as id")
    _kill(info.services[0])
    assert not _status(stack).up
    assert _execute(stack.up(services=DATABASE_ONLY), "select count(*) from kept") == [(1000,)]


def test_a_pid_file_that_names_a_stranger_stops_nobody(own_stack):
    """PostgreSQL's own stale pid file may name any process by now; it starts all the same (E2)."""
    stack = own_stack()
    stack.up(services=DATABASE_ONLY)
    stack.down()
    pid_file = stack.directory / "postgres" / "data" / "postmaster.pid"
    with subprocess.Popen(["sleep", "60"]) as stranger:
        pid_file.write_text(f"{stranger.pid}\n{pid_file.parent}\n1\n1\n\n127.0.0.1\n1 1\n")
        assert stack.up(services=DATABASE_ONLY).up
        assert stranger.poll() is None
        stranger.kill()


def test_a_stale_state_harms_no_stranger(own_stack):
    """`down` signals nobody who merely got a remembered pid (E2)."""
    stack = own_stack()
    stack.up(services=DATABASE_ONLY)
    stack.down()
    state = load(stack.directory)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        server = state.get("postgres")
        stale = Service("postgres", server.port, None, Identity(stranger.pid, "another-boot/1"))
        save(stack.directory, state.having(stale))
        assert stack.down()
        assert stranger.poll() is None
        stranger.kill()


def test_a_port_taken_by_somebody_else_is_replaced(own_stack):
    """A remembered port that is taken is given up, that is said, and the data are there (E2)."""
    stack = own_stack()
    info = stack.up(services=DATABASE_ONLY)
    _execute(info, "create table kept as select 1 as id")
    stack.down()
    port = info.services[0].port
    with socket.create_server(("127.0.0.1", port)):
        again, said = _said(stack, services=DATABASE_ONLY)
        assert f"postgres: port {port} was taken by somebody else, choosing another" in said
        assert again.services[0].port != port
        assert _execute(again, "select id from kept") == [(1,)]


def test_fresh_begins_anew(own_stack):
    """`--fresh` deletes everything that was in the stack, running or not (E2)."""
    stack = own_stack()
    info = stack.up(services=DATABASE_ONLY)
    _execute(info, "create table gone as select 1 as id")
    again = stack.up(fresh=True, services=DATABASE_ONLY)
    assert not info.services[0].alive
    assert _execute(again, "select to_regclass('gone')") == [(None,)]


def test_two_at_once_start_one(own_stack):
    """Two commands at the same time: one starts, the other waits and finds it (E2)."""
    stack = own_stack()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: stack.up(services=DATABASE_ONLY), range(2))
    assert first == second


def test_what_a_failed_start_began_is_ended(own_stack):
    """A start that fails leaves no process, and what ran before goes on (E2)."""
    stack = own_stack()
    stack.up(services=DATABASE_ONLY)
    stack.down()
    (stack.directory / "postgres" / "data" / "global" / "pg_control").write_bytes(b"spoilt")
    with pytest.raises(StackError, match="PostgreSQL is not running any more") as caught:
        stack.up(services=DATABASE_ONLY)
    assert str(stack.directory / "postgres.log") in (caught.value.hint or "")
    assert stack.status() is None


def test_data_of_another_version_are_left_alone(own_stack):
    """Another PostgreSQL's data are refused with the way out (E2)."""
    stack = own_stack()
    data = stack.directory / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("16\n")
    with pytest.raises(StackError, match="was written by PostgreSQL 16") as caught:
        stack.up(services=DATABASE_ONLY)
    assert "--fresh" in (caught.value.hint or "")
    assert (data / "PG_VERSION").read_text() == "16\n"


def test_an_interrupted_initdb_is_not_believed(own_stack):
    """What a killed first start left half done is made anew (E2)."""
    stack = own_stack()
    half = stack.directory / "postgres" / "new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    assert stack.up(services=DATABASE_ONLY).up
    assert not half.exists()


def test_ctrl_c_while_starting_leaves_nothing(own_stack):
    """Interrupted, `up` ends what it has begun (E2)."""
    stack = own_stack()
    command = [sys.executable, "-m", "sideline", "stack", "up", "--directory", stack.directory]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
        while "kafka-1: starting" not in (line := up.stderr.readline()):
            assert line, "ended before it started anything"
        wait_for(lambda: _begun(stack), what="a broker under way")
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=60)
    assert up.returncode == 130
    assert stack.status() is None


def _begun(stack: Stack) -> bool:
    info = stack.status()
    return info is not None and bool(info.pids)


def test_a_very_long_path_does_not_matter(own_stack):
    """No Unix socket, so no limit on the length of its path (E2)."""
    stack = own_stack()
    deep = Stack(stack.directory.parent.joinpath(*["a" * 60] * 3, ".sideline"))
    try:
        assert _execute(deep.up(services=DATABASE_ONLY), "select 1") == [(1,)]
    finally:
        deep.down()


def test_three_brokers_outlive_the_loss_of_one(own_stack):
    """Replicated three times, two in sync: a killed broker costs no event (P4)."""
    stack = own_stack()
    info = stack.up(brokers=3, services=("kafka",))
    assert info.brokers == 3
    _publish(info, "replicated", "one")
    topic = AdminClient({"bootstrap.servers": info.bootstrap}).list_topics("replicated", timeout=30)
    assert len(topic.topics["replicated"].partitions[0].replicas) == 3
    leader = topic.topics["replicated"].partitions[0].leader
    _kill(info.services[leader - 1])
    _publish(info, "replicated", "two")
    assert _read(info, "replicated", 2) == ["one", "two"]
    with pytest.raises(RefusedError, match="made with 3 brokers"):
        stack.up(brokers=1)
    again = stack.up(services=("kafka",))
    assert again.up
    assert again.brokers == 3
