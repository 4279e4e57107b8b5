"""Rights, read-only places and full disks, for users to whom they apply (E2)."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from sideline.errors import StackError
from sideline.stack import Stack, processes, starting
from sideline.stack.jars import broker_jars
from sideline.stack.java import find_java
from sideline.stack.processes import User
from tests.support.waiting import wait_for

MB = 1 << 20

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def place(run):
    """A directory that everybody can reach, if not write to."""
    run.root.chmod(0o755)
    made = run.directory("walls")
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def as_nobody():
    """Run `sideline` as a user whom root's walls hold; he may read everything, not write."""
    nobody = pwd.getpwnam("nobody")

    def run(*arguments, **environ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sideline", *arguments]
        user = User(nobody.pw_uid, nobody.pw_gid, reach=True)
        return subprocess.run(
            processes.launched(command, log=None, user=user),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environ},
        )

    return run


@needs_root
@pytest.mark.parametrize("command", ["up", "down"])
def test_a_directory_of_somebody_else_is_named(place, as_nobody, command):
    """No right to write: one sentence, exit code 1, and nothing changed (E2)."""
    stack = place / ".sideline"
    stack.mkdir()
    (stack / "stack.json").write_text(
        '{"format": 1, "cluster": "x", "versions": {}, "services": []}'
    )
    answer = as_nobody("stack", command, "--directory", stack)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"sideline: cannot create {stack}: you have no right")
    assert "--directory" in answer.stderr
    assert len(answer.stderr.splitlines()) == 2
    assert [entry.name for entry in stack.iterdir()] == ["stack.json"]


@needs_root
def test_a_place_that_cannot_be_written_is_named(place, as_nobody):
    """A directory cannot be made: one sentence, and `--json` has it as an object (E2)."""
    answer = as_nobody("stack", "up", "--json", "--directory", place / "new")
    assert answer.returncode == 1
    error = json.loads(answer.stdout)
    assert error["error"] == "stack"
    assert error["message"].startswith(f"cannot create {place / 'new'}")
    assert not (place / "new").exists()


@needs_root
def test_a_cache_that_cannot_be_written_is_named(place, as_nobody):
    """A cache of somebody else's: the sentence says what chooses another one (E2)."""
    mine = place / "mine"
    mine.mkdir()
    shutil.chown(mine, "nobody")
    (place / "cache").mkdir()
    answer = as_nobody(
        "stack", "up", "--directory", mine / "stack", SIDELINE_CACHE=str(place / "cache")
    )
    assert answer.returncode == 1
    assert f"cannot write to {place / 'cache' / 'jars'}" in answer.stderr
    assert "SIDELINE_CACHE" in answer.stderr
    assert list((place / "cache").iterdir()) == []


@needs_root
def test_an_ordinary_user_has_a_stack_of_his_own(place, as_nobody):
    """Not root, nothing but a directory: up, status, down (E2)."""
    mine = place / "mine"
    mine.mkdir()
    shutil.chown(mine, "nobody")
    jars = broker_jars(find_java(), progress=lambda what, text: None)
    options = ("--directory", mine / "stack", "--json")
    try:
        up = as_nobody("stack", "up", *options, SIDELINE_KAFKA_JARS=str(jars))
        assert up.returncode == 0, up.stderr
        owners = {
            Path(f"/proc/{each['pid']}").stat().st_uid for each in json.loads(up.stdout)["services"]
        }
        assert owners == {pwd.getpwnam("nobody").pw_uid}
        assert as_nobody("stack", "status", *options).returncode == 0
        assert as_nobody("stack", "down", *options).returncode == 0
    finally:
        Stack(mine / "stack").down()


@pytest.fixture
def small_disk(place):
    """Mount a small disk."""
    mounted = []

    def mount(megabytes: int):
        point = place / "disk"
        point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", point]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            pytest.skip("no right to mount a file system")
        mounted.append(point)
        return point

    yield mount
    for point in mounted:
        subprocess.run(["umount", point], check=True)


def test_too_little_space_is_said_before_anything_is_begun(small_disk):
    """A disk on which the first events would not fit is refused (E2)."""
    stack = Stack(small_disk(100) / ".sideline")
    with pytest.raises(
        StackError, match=r"only \d+ MB are free for .*, and the stack needs 200 MB"
    ):
        stack.up()
    assert stack.status() is None


def test_a_disk_that_fills_up_while_starting_is_said(small_disk, monkeypatch):
    """Space that was there a moment ago is gone: the reason, and nothing runs (E2)."""
    monkeypatch.setattr(starting, "_NEEDED_BYTES", 0)
    stack = Stack(small_disk(20) / ".sideline")
    with pytest.raises(StackError, match="the disk is full"):
        stack.up(services=("postgres",))
    assert stack.status() is None


def test_a_broker_that_died_of_a_full_disk_says_so(small_disk):
    """The reason is known although the log itself had no space for it (E2)."""
    disk = small_disk(260)
    stack = Stack(disk / ".sideline")
    info = stack.up(services=("kafka",))
    try:
        admin = AdminClient({"bootstrap.servers": info.bootstrap, "log_level": 0})
        admin.create_topics([NewTopic("full", 1)])["full"].result(30)
        _fill(disk)
        producer = Producer({"bootstrap.servers": info.bootstrap, "log_level": 0})

        def broken() -> bool:
            producer.produce("full", bytes(200_000))
            producer.poll(0.1)
            return not info.up

        wait_for(broken, what="the end of the broker", within_seconds=60)
        producer.purge()
        producer.flush(10)
        found = stack.status()
        assert found is not None
        assert found.problem(found.dead[0]).message == "kafka-1 ended: the disk is full."
        with pytest.raises(StackError, match="MB are free"):
            stack.up()
        with pytest.raises(StackError, match="the disk is full"):
            stack.down()
    finally:
        (disk / "filler").unlink()
        assert stack.down()
    assert stack.status() is None


def _fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(disk).free < MB
