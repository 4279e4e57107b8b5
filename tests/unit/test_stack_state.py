"""What is remembered of a stack, and what is told of it (E2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sideline.errors import StackError
from sideline.stack import current, processes
from sideline.stack.processes import Identity
from sideline.stack.state import Service, State, describe, load, password_file, save

PASSWORD = "3f1c0ffee"


@pytest.fixture
def living() -> Identity:
    return Identity(os.getpid(), processes.started(os.getpid()) or "")


@pytest.fixture
def directory(tmp_path):
    password_file(tmp_path).parent.mkdir()
    password_file(tmp_path).write_text(f"127.0.0.1:*:*:sideline:{PASSWORD}\n")
    return tmp_path


@pytest.fixture
def state(living):
    return State(
        cluster="abc",
        versions={"kafka": "4.3.1"},
        services=(
            Service("kafka-1", 20001, 20002, living),
            Service("kafka-2", 20003, 20004, living),
            Service("postgres", 20005, None, living),
        ),
    )


def test_state_survives_being_written(directory, state):
    """What is read is what was written (E2)."""
    save(directory, state)
    assert load(directory) == state
    assert [file.name for file in directory.glob("stack*")] == ["stack.json"]


def test_a_running_stack_is_found(directory, state):
    """Addresses and pids of everything that runs (E2)."""
    save(directory, state)
    found = current(directory)
    assert found is not None
    assert found.bootstrap == "127.0.0.1:20001,127.0.0.1:20003"
    assert found.database == f"postgresql://sideline:{PASSWORD}@127.0.0.1:20005/sideline"
    assert found.brokers == 2
    assert found.pids == dict.fromkeys(("kafka-1", "kafka-2", "postgres"), os.getpid())


def test_no_stack_is_none(tmp_path):
    """Where there never was a stack there is none, and looking for it leaves no trace (E2)."""
    assert current(tmp_path / "none") is None
    assert current(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_stack_that_is_down_is_none(directory, state):
    """Remembered ports alone are no stack (E2)."""
    save(directory, State("abc", {}, tuple(each.stopped() for each in state.services)))
    assert current(directory) is None


def test_a_dead_or_reused_pid_is_no_service(directory, state, living):
    """A stale entry, its pid meanwhile somebody else's, is not taken for a running broker (E2)."""
    stale = Identity(living.pid, "another-boot/1")
    save(directory, state.having(Service("kafka-2", 20003, 20004, stale)))
    assert current(directory) is None
    remembered = load(directory)
    assert remembered is not None
    assert [each.name for each in describe(directory, remembered).dead] == ["kafka-2"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1}'])
def test_a_spoilt_state_is_said_in_one_sentence(tmp_path, text):
    """The file is named, with the next step (E2)."""
    (tmp_path / "stack.json").write_text(text)
    with pytest.raises(StackError, match=r"stack\.json is not the state of a stack"):
        current(tmp_path)


def test_the_password_is_shown_to_nobody(directory, state):
    """Neither what is printed nor what goes out as JSON holds the password (E2)."""
    save(directory, state)
    info = describe(directory, state)
    assert PASSWORD not in repr(info)
    assert PASSWORD not in json.dumps(info.as_dict())
    assert PASSWORD not in (directory / "stack.json").read_text()


def test_looking_a_stack_up_is_light():
    """Nothing that starts a stack, and no client, is imported for it (E2)."""
    heavy = {"psycopg", "confluent_kafka", "pyspark", "rich"}
    code = f"import sys, sideline.stack as s; s.current(); print({heavy!r} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"
