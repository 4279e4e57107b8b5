"""`sideline stack` as a person or a script uses it (E2)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from sideline.settings import load
from sideline.stack import Stack
from tests.support.waiting import wait_for


@pytest.fixture
def project(run):
    """An empty project directory; a stack that is up in it is stopped afterwards."""
    place = run.directory("project")
    yield place
    Stack(place / ".sideline").down()
    shutil.rmtree(place)


@pytest.fixture
def sideline(project):
    """Run the command in the project."""

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sideline", "stack", *arguments],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **environ},
        )

    return run


def test_the_way_of_a_stack(sideline, project):
    """Up, status, a killed broker, up, down: data on stdout, words on stderr, the right codes."""
    up = sideline("up", "--json")
    assert up.returncode == 0, up.stderr
    assert "kafka-1: starting" in up.stderr
    info = json.loads(up.stdout)
    assert info["up"]
    assert [service["name"] for service in info["services"]] == ["kafka-1", "postgres"]

    again = sideline("up")
    assert (again.returncode, again.stdout.splitlines()[0].split("\t")[0]) == (0, "service")
    assert info["kafka"] in again.stdout
    assert "starting" not in again.stderr

    settings = load(directory=project, environ={})
    assert settings.kafka == info["kafka"]
    assert settings.origins["database"] == "stack in ./.sideline"

    status = sideline("status", "--json")
    assert (status.returncode, json.loads(status.stdout), status.stderr) == (0, info, "")

    _kill_broker(project)
    status = sideline("status")
    assert status.returncode == 3
    assert "dead" in status.stdout
    assert "sideline: kafka-1 is not running any more." in status.stderr
    assert "sideline stack up" in status.stderr
    report = json.loads(sideline("status", "--json").stdout)
    assert [service["alive"] for service in report["services"]] == [False, True]
    assert load(directory=project, environ={}).kafka is None

    assert "kafka-1: was not running any more" in sideline("up").stderr
    assert json.loads(sideline("down", "--json").stdout) == {"stopped": True}


def _kill_broker(project) -> None:
    info = Stack(project / ".sideline").status()
    assert info is not None
    os.kill(info.pids["kafka-1"], signal.SIGKILL)
    wait_for(lambda: not info.up, what="the end of the broker")


def test_where_there_is_none(sideline, project):
    """Nothing is up: status says so with 4, down is harmless, and neither leaves a trace (E2)."""
    status = sideline("status")
    assert status.returncode == 4
    assert status.stdout == ""
    assert status.stderr.startswith("sideline: no stack is up in .sideline.\n")
    assert json.loads(sideline("status", "--json").stdout)["error"] == "not-found"
    down = sideline("down")
    assert (down.returncode, down.stdout, down.stderr) == (0, "", "Nothing was running.\n")
    assert list(project.iterdir()) == []


@pytest.mark.parametrize("arguments", [("up", "--brokers", "0"), ("up", "--brokers", "x"), ("on",)])
def test_wrong_usage(sideline, project, arguments):
    """A wrong call is exit code 2, and changes nothing (E2)."""
    answer = sideline(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.startswith("sideline: ")
    assert list(project.iterdir()) == []


def test_another_number_of_brokers_is_refused(sideline, project):
    """A stack keeps the number of brokers it was made with, down or up (E2)."""
    state = {
        "name": "kafka-1", "port": 20001, "controller_port": 20002, "process": None,
    }  # fmt: skip
    (project / ".sideline").mkdir()
    (project / ".sideline" / "stack.json").write_text(
        json.dumps({"format": 1, "cluster": "x", "versions": {}, "services": [state]})
    )
    answer = sideline("up", "--brokers", "3")
    assert answer.returncode == 5
    assert "--fresh --brokers 3" in answer.stderr
