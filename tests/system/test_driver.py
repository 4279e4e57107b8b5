"""The driver's place: one at a time, and whoever lost it writes nothing more."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from pathlib import Path

import psutil
import pyspark
import pytest

from sideline.errors import AlreadyRunningError
from sideline.status import gather
from tests.support.pipelines import (
    APPLIED,
    applied,
    execute,
    faults,
    group_offsets,
    numbered,
    progress,
    publish,
    query,
    recorder,
    settings,
    workers_of,
    write_app,
)
from tests.support.waiting import wait_for


def enough(database: str, count: int) -> None:
    """Wait until so many events took effect."""
    wait_for(lambda: len(applied(database)) >= count, what=f"{count} events", within_seconds=120)


def test_a_second_driver_is_refused_while_the_first_stands(start, ready, kafka, topics):
    """Who, where, since when; the first one does not notice."""
    topic = topics(partitions=1)
    first = start(recorder("lonely", topic))
    wait_for(lambda: progress(ready.database, "lonely"), what="the first driver")

    with pytest.raises(AlreadyRunningError) as caught:
        start(recorder("lonely", topic)).wait(60)

    message = caught.value.message
    assert f"process {os.getpid()} on {socket.gethostname()}, since 20" in message
    assert "--take-over" in caught.value.hint
    assert caught.value.exit_code == 5
    sent = publish(kafka, topic, numbered(20))
    enough(ready.database, 20)
    assert first.is_alive
    assert faults(applied(ready.database), sent) == []


def test_two_pipelines_of_one_name_in_different_code(start, ready, kafka, topics):
    """The second is told that it is not the same pipeline."""
    topic = topics(partitions=1)
    start(recorder("same", topic))
    wait_for(lambda: progress(ready.database, "same"), what="the first driver")
    other = recorder("same", topic)
    other.handler(lambda event: None)

    with pytest.raises(AlreadyRunningError, match="with other code"):
        start(other).wait(60)


def test_after_kill_9_of_the_driver_a_restart_works_at_once(
    command, ready, database, kafka, topics, finish, tmp_path
):
    """The crashed driver's place is free with its connection (C2, P4).

    Status says what it was like, and how far behind it is while it is down (S4).
    """
    topic = topics(partitions=4)
    sent = publish(kafka, topic, numbered(8_000))
    app = write_app(tmp_path, "killed", topic, before="time.sleep(0.005)")
    running = command("run", app)
    wait_for(
        lambda: progress(database, "killed") and gather(ready, "killed")[0]["events_per_second"],
        what="a rate",
        within_seconds=120,
    )
    (alive,) = gather(ready, "killed")
    assert (alive["state"], alive["driver"]["pid"]) == ("running", running.process.pid)
    assert alive["lag"] > 0

    running.signal(signal.SIGKILL)
    running.end()
    asked = command("status", "killed", "--json")
    assert asked.end() == 0, asked.err
    down = asked.json()
    assert (down["state"], down["driver"], down["events_per_second"]) == ("crashed", None, 0.0)
    assert 0 < down["lag"] < len(sent)
    assert down["lag"] == sum(part["lag"] for part in down["partitions"])
    # The oldest event that waits was made before the driver began.
    assert down["lag_seconds"] > 1
    finish(recorder("killed", topic))

    assert faults(applied(database), sent) == []
    (done,) = gather(ready, "killed")
    assert (done["state"], done["lag"], done["lag_seconds"]) == ("stopped", 0, 0.0)


@pytest.mark.parametrize("point", ["before-group-commit", "while-stopping"])
def test_a_driver_killed_at_a_point(
    command, ready, database, kafka, topics, finish, tmp_path, point
):
    """Group offsets are a copy: the next run shows what progress says (C2, C5)."""
    topic = topics(partitions=2)
    sent = publish(kafka, topic, numbered(2_000))
    app = write_app(tmp_path, "points", topic, before="time.sleep(0.002)")
    running = command("run", app, SIDELINE_CRASH_AT=point)
    if point == "while-stopping":
        wait_for(
            lambda: progress(database, "points") and applied(database),
            what="first events",
            within_seconds=120,
        )
        running.signal(signal.SIGTERM)

    assert running.end(120) == -signal.SIGKILL, running.err
    finish(recorder("points", topic))

    assert faults(applied(database), sent) == []
    reached = {number: offset for (_, number), offset in progress(database, "points").items()}
    assert sum(reached.values()) == len(sent)
    assert group_offsets(kafka, "points", topic, 2) == reached


def jvm_of(running) -> psutil.Process:
    """The JVM that a command started."""
    children = psutil.Process(running.process.pid).children()
    (jvm,) = [child for child in children if child.name() == "java"]
    return jvm


@pytest.fixture
def dying(command, ready, database, kafka, topics, finish, tmp_path):
    """Kill what the command consists of, at random, while events flow; then do the rest."""

    def die(kinds):
        topic = topics(partitions=2)
        app = write_app(tmp_path, "dying", topic, before="time.sleep(0.002)")
        sent = []
        for kind in kinds:
            sent += publish(kafka, topic, numbered(1_000))
            before = len(applied(database))
            running = command("run", app)
            enough(database, before + 1)
            end = running.process.kill if kind == "driver" else jvm_of(running).kill
            timer = threading.Timer(random.uniform(0, 1.5), end)
            timer.start()
            running.end()
            timer.join()
        finish(recorder("dying", topic))
        assert faults(applied(database), sent) == []

    return die


def test_jvm_and_driver_killed_at_any_moment(dying):
    """SIGKILL whenever it comes: nothing lost, twice or out of order (P4, C1, C2)."""
    dying(random.sample(["jvm", "driver"], 2))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_jvm_and_driver_killed_again_and_again(dying):
    """The same, twenty times."""
    dying(random.choices(["jvm", "driver"], k=20))


def test_a_frozen_driver_that_was_replaced_stops_by_itself(
    command, ready, database, kafka, topics, start, tmp_path
):
    """--take-over; the zombie wakes up, exits 5, and has written nothing after losing (C2)."""
    topic = topics(partitions=2)
    sent = publish(kafka, topic, numbered(100))
    zombie = command("run", write_app(tmp_path, "zombie", topic))
    enough(database, 100)
    zombie.signal(signal.SIGSTOP)

    with pytest.raises(AlreadyRunningError, match=f"process {zombie.process.pid}"):
        start(recorder("zombie", topic)).wait(60)
    second = start(recorder("zombie", topic), take_over=True)
    # Until then the workers of the frozen one may still be the ones who apply.
    driver = "select driver_pid from sideline.pipelines"
    wait_for(lambda: query(database, driver) == [(os.getpid(),)], what="the second to take over")
    sent += publish(kafka, topic, numbered(100))
    enough(database, 200)
    epoch = query(database, "select epoch, driver_pid, state from sideline.pipelines")
    zombie.signal(signal.SIGCONT)

    assert zombie.end() == 5
    assert "is run by another process now" in zombie.err
    assert "Traceback" not in zombie.err
    sent += publish(kafka, topic, numbered(100))
    enough(database, 300)
    assert second.is_alive
    assert query(database, "select epoch, driver_pid, state from sideline.pipelines") == epoch
    assert epoch[0][1:] == (os.getpid(), "running")
    assert faults(applied(database), sent) == []


def test_a_frozen_worker_that_was_replaced_writes_nothing(
    command, ready, database, kafka, topics, finish, tmp_path
):
    """Workers of a killed driver, frozen and woken up later: fenced (K1, K3)."""
    topic = topics(partitions=2)
    sent = publish(kafka, topic, numbered(4_000))
    app = write_app(tmp_path, "undead", topic, before="time.sleep(0.001)")
    running = command("run", app)
    wait_for(
        lambda: progress(database, "undead") and applied(database),
        what="first events",
        within_seconds=120,
    )
    workers = [psutil.Process(worker) for worker in workers_of(running)]
    assert workers
    for worker in workers:
        worker.suspend()
    running.signal(signal.SIGKILL)
    running.end()

    finish(recorder("undead", topic))
    assert faults(applied(database), sent) == []
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()
    psutil.wait_procs(workers, timeout=30)

    assert faults(applied(database), sent) == []


def test_a_killed_jvm_ends_the_command_and_loses_nothing(
    command, ready, database, kafka, topics, finish, tmp_path
):
    """Without its JVM the command says so and exits; the next run goes on (P4)."""
    topic = topics(partitions=2)
    sent = publish(kafka, topic, numbered(4_000))
    app = write_app(tmp_path, "headless", topic, before="time.sleep(0.001)")
    running = command("run", app)
    wait_for(
        lambda: progress(database, "headless") and applied(database),
        what="first events",
        within_seconds=120,
    )
    jvm_of(running).kill()

    assert running.end() == 7, running.err
    assert "sideline: Spark's JVM has ended." in running.err
    finish(recorder("headless", topic))
    assert faults(applied(database), sent) == []


def test_postgresql_restarted_under_a_running_pipeline(start, own_stack, kafka, topics, spark):
    """Stopped hard and started again: it goes on by itself, nothing lost or doubled (C2, F2)."""
    stack = own_stack("outage")
    info = stack.up(services=("postgres",))
    database = info.database
    execute(database, APPLIED)
    topic = topics(partitions=2)
    sent = publish(kafka, topic, numbered(300))
    running = start(recorder("outage", topic), settings=settings(kafka, database))
    enough(database, 300)

    # What `pg_ctl stop -m immediate` does: no farewell to anybody.
    server = psutil.Process(info.pids["postgres"])
    server.send_signal(signal.SIGQUIT)
    psutil.wait_procs([server], timeout=30)
    sent += publish(kafka, topic, numbered(300))
    wait_for(lambda: running.status()["troubles"], what="word of the outage", within_seconds=60)
    assert running.is_alive
    stack.up(services=("postgres",))
    enough(database, 600)

    assert faults(applied(database), sent) == []
    wait_for(
        lambda: not running.status()["troubles"], what="the end of the troubles", within_seconds=60
    )
    running.stop()
    assert running.wait(60)


def spark_home(folder: Path) -> Path:
    """Spark as it is installed; what a local cluster writes goes with the test."""
    folder.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (folder / entry.name).symlink_to(entry)
    return folder


def executors_of(running) -> list[psutil.Process]:
    """The executors of a command's local cluster, those that are there now."""
    found = []
    for process in psutil.Process(running.process.pid).children(recursive=True):
        # Processes end while they are looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            if process.name() == "java" and "CoarseGrainedExecutorBackend" in words:
                found.append(process)
    return found


def test_an_executor_that_dies_costs_time_only(command, ready, database, kafka, topics, tmp_path):
    """Executors of a local cluster are killed while they work (P4)."""
    topic = topics(partitions=4)
    sent = publish(kafka, topic, numbered(600))
    # They have something in hand until one of them is dead.
    gate = tmp_path / "dead"
    closed = f"event.offset >= 20 and not os.path.exists({str(gate)!r})"
    before = f"while {closed}: time.sleep(0.02)"
    app = write_app(tmp_path, "executors", topic, before=before, options="slice_size=10")
    running = command(
        *("run", app, "--once", "--slots", "2", "--master", "local-cluster[2,1,1024]"),
        SPARK_LOCAL_IP="127.0.0.1",
        SPARK_HOME=str(spark_home(tmp_path / "spark")),
    )
    wait_for(
        lambda: progress(database, "executors") and applied(database),
        what="first events",
        within_seconds=180,
    )
    wait_for(lambda: len(executors_of(running)) == 2, what="both executors", within_seconds=120)

    executors_of(running)[0].kill()
    gate.touch()

    assert running.end(180) == 0, running.err
    assert faults(applied(database), sent) == []
