"""The offsets that lag tools see, through the death of a coordinator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from confluent_kafka.admin import AdminClient, NewTopic

from tests.conftest import _create
from tests.support.pipelines import group_offsets

# A process of its own: whatever ends it must not end the tests.
CHILD = """
import sys
from sideline.engine.lease import Partition
from sideline.errors import KafkaUnreachableError
from sideline.topics import admin

admin.ANSWER_SECONDS = 2.0
cluster = admin.Cluster({"bootstrap.servers": sys.argv[1]})
for line in sys.stdin:
    try:
        print(cluster.commit_group("shown", {Partition("users", 0): int(line)}), flush=True)
    except KafkaUnreachableError:
        print("away", flush=True)
"""


def test_whoever_shows_offsets_outlives_their_coordinator(own_stack):
    """A driver whose group's coordinator dies and comes back says so, and goes on (P4, C5)."""
    stack = own_stack()
    info = stack.up(services=("kafka",))
    _create(AdminClient({"bootstrap.servers": info.bootstrap}), NewTopic("users", 1, 1))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, info.bootstrap],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:

        def say(offset: int) -> str:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{offset}\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        try:
            _until(say, 1)
            os.kill(stack.status().pids["kafka-1"], signal.SIGKILL)
            assert say(2) == "away"
            stack.up(services=("kafka",))
            _until(say, 3)
            assert group_offsets(info.bootstrap, "shown", "users", 1) == {0: 3}
            assert child.poll() is None
        finally:
            child.kill()


def _until(say, offset: int) -> None:
    """Ask until it is shown: a broker that has just started has no coordinators yet."""
    while (answer := say(offset)) != "True":
        assert answer == "away"
