"""The small parts of the stack: settings, ports, sentences (E2)."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sideline.errors import RefusedError, StackError
from sideline.stack import embedded, faults, kafka, locks, ports, postgres
from sideline.stack.state import Service, State

ONE = [Service("kafka-1", 1001, 1002)]
THREE = [Service(f"kafka-{n}", 1000 + n, 2000 + n) for n in (1, 2, 3)]


def _properties(cluster: list[Service]) -> dict[str, str]:
    return kafka.properties(Path("/x"), cluster[0], cluster)


def test_everything_listens_on_loopback_only():
    """No service of the stack can be reached from another machine (E2)."""
    for key, value in _properties(THREE).items():
        for host in re.findall(r"(?://|@)([^:,]*):", value):
            assert host == "127.0.0.1", key
    assert postgres._SETTINGS["listen_addresses"] == "127.0.0.1"


@pytest.mark.parametrize(("cluster", "copies", "in_sync"), [(ONE, "1", "1"), (THREE, "3", "2")])
def test_replication_follows_the_number_of_brokers(cluster, copies, in_sync):
    """Three brokers replicate three times and need two in sync (P4)."""
    settings = _properties(cluster)
    for what in ("default", "offsets.topic", "transaction.state.log"):
        assert settings[f"{what}.replication.factor"] == copies
    assert settings["min.insync.replicas"] == in_sync
    assert settings["transaction.state.log.min.isr"] == in_sync
    assert settings["unclean.leader.election.enable"] == "false"


def test_a_mistyped_topic_does_not_come_into_being():
    """Topics are made on purpose only (E2)."""
    assert _properties(ONE)["auto.create.topics.enable"] == "false"


def test_every_broker_knows_all_controllers():
    """The voters are the same for each, and each has a number of its own (E2)."""
    each = [kafka.properties(Path("/x"), broker, THREE) for broker in THREE]
    assert len({settings["controller.quorum.voters"] for settings in each}) == 1
    assert [settings["node.id"] for settings in each] == ["1", "2", "3"]


def test_cluster_ids_are_no_options():
    """An id that began with a dash would be taken for an option by Kafka's tool (E2)."""
    ids = {kafka.new_cluster() for _ in range(2000)}
    assert len(ids) == 2000
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{21}", each) for each in ids)


def test_postgres_stays_as_safe_as_in_production():
    """A commit that was acknowledged is on disk (C3)."""
    assert not {"fsync", "synchronous_commit", "full_page_writes"} & set(postgres._SETTINGS)


def test_a_taken_port_is_seen():
    """A port that somebody listens on is not free, and is not chosen (E2)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not ports.is_free(port)
        assert ports.answers(port)
    assert ports.is_free(port)
    assert not ports.answers(port)


def test_ports_are_chosen_apart():
    """A port that is promised to another service is not given away twice (E2)."""
    promised = ports._CHOICE[:6000]
    assert {ports.free_port(promised) in ports._CHOICE[6000:] for _ in range(20)} == {True}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "read-only file system"),
        (errno.EACCES, "no right"),
        (errno.EPERM, "belongs to somebody else"),
        (errno.ENOTDIR, "is a file"),
        (errno.ENAMETOOLONG, "too long"),
        (errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_what_the_system_refuses_is_said_in_a_sentence(code, words):
    """Each refusal names the path, the reason and the next step (E2)."""
    with pytest.raises(StackError) as caught, faults.explained("write to", Path("/some/place")):
        raise OSError(code, os.strerror(code))
    assert caught.value.message.startswith("cannot write to /some/place: ")
    assert words in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("last_words", "reason"),
    [
        ("java.io.IOException: No space left on device", "the disk is full"),
        ("FATAL: could not write: No space left on device\nPANIC", "the disk is full"),
        ("Failed to acquire lock on file .lock in /x", "another process uses its data"),
        ('FATAL:  lock file "postmaster.pid" already exists', "another PostgreSQL uses its data"),
        ("java.lang.OutOfMemoryError: Java heap space", "it ran out of memory"),
        ("There is insufficient memory for the Java Runtime", "no memory left"),
        ("open: Permission denied", "no right"),
    ],
)
def test_a_services_last_words_are_translated(last_words, reason):
    """Why a service ended is said where its log shows it, with the log's place (E2)."""
    error = faults.ended("kafka-1", f"INFO fine\n{last_words}\n", Path("/x/kafka-1.log"))
    assert error.message.startswith("kafka-1 ended: ")
    assert reason in error.message
    assert "/x/kafka-1.log" in (error.hint or "")


def test_a_service_without_last_words_points_to_its_log():
    """A killed service says nothing itself (E2)."""
    error = faults.ended("kafka-1", "INFO fine", Path("/x/kafka-1.log"))
    assert error.message == "kafka-1 is not running any more."
    assert "/x/kafka-1.log" in (error.hint or "")


def test_only_the_end_of_a_log_is_read(tmp_path):
    """A log of any size costs the same (E2)."""
    log = tmp_path / "log"
    log.write_text("old " * 10_000 + "last words")
    assert faults.tail(log, 10) == "last words"
    assert faults.tail(tmp_path / "none") == ""


def test_a_lock_ends_with_its_holder(tmp_path):
    """A holder that is killed leaves no lock behind (E2)."""
    lock = tmp_path / "lock"
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(1); input()"
    waited = []
    with subprocess.Popen(
        [sys.executable, "-uc", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        with locks.locked(lock, waiting=lambda: waited.append(holder.kill())):
            assert waited == [None]


def test_the_number_of_brokers_is_kept():
    """Without a wish it is what it was, at first one; another number is refused (E2)."""
    three = State("abc", {}, tuple(THREE))
    assert embedded._brokers(None, None) == 1
    assert embedded._brokers(three, None) == 3
    assert embedded._brokers(three, 3) == 3
    with pytest.raises(RefusedError, match="was made with 3 brokers, not 1") as caught:
        embedded._brokers(three, 1)
    assert "--fresh --brokers 1" in (caught.value.hint or "")
    with pytest.raises(RefusedError, match="1 to 9 brokers, not 0"):
        embedded._brokers(None, 0)
