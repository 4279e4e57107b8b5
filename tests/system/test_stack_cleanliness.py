"""A test run leaves nothing behind, and says so when it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sideline.stack.processes import started
from tests.support.run import TOKEN_VARIABLE
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture
def inner_run(tmp_path):
    """Run one test in a pytest of its own, with our fixtures."""

    def run(body: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_inner.py").write_text(
            f"import os, subprocess\n\ndef test_it(run, request):\n    {body}\n"
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", *options]
        environ = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
        return subprocess.run(
            [*command, "-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", "/dev/null",
             tmp_path / "test_inner.py"],
            cwd=ROOT,
            env={**environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )  # fmt: skip

    return run


def test_a_clean_run_passes(inner_run, tmp_path):
    """Nothing left, nothing said."""
    answer = inner_run("run.directory('x').rmdir()")
    assert answer.returncode == 0, answer.stdout
    assert not list(tmp_path.glob("sideline-test-*"))


def test_a_process_that_is_left_fails_the_run_and_is_ended(inner_run, tmp_path):
    """Whatever a test starts and forgets is named, and does not outlive the run."""
    answer = inner_run(
        f"print(subprocess.Popen(['sleep', '99'], start_new_session=True).pid,"
        f" file=open('{tmp_path}/pid', 'w'))"
    )
    assert answer.returncode == 1
    assert "left behind by this run: process" in answer.stdout
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: started(pid) is None, what="the end of the process")


def test_a_directory_that_is_left_fails_the_run(inner_run, tmp_path):
    """Files of a test are the test's to delete."""
    answer = inner_run("run.directory('x')")
    assert answer.returncode == 1
    assert "left behind by this run: directory" in answer.stdout
    assert not list(tmp_path.glob("sideline-test-*"))


def test_what_one_of_several_leaves_fails_the_run(inner_run, tmp_path):
    """Side by side, nothing is lost on the way to the one who speaks."""
    answer = inner_run("run.directory('x')", "-n", "2")
    assert answer.returncode == 1, answer.stdout
    assert "left behind by this run: directory" in answer.stdout
    # Whoever is slow to end is ended, and its guardian still clears away.
    wait_for(lambda: not list(tmp_path.glob("sideline-test-*")), what="an empty directory")


def test_a_run_that_is_killed_leaves_no_stack(inner_run, tmp_path):
    """Without any teardown (a timeout ends pytest like this) the guardian clears away."""
    inner_run(
        f"info = request.getfixturevalue('postgres_server'); "
        f"open('{tmp_path}/pid', 'w').write(str(info.pids['postgres'])); os._exit(9)"
    )
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: started(pid) is None, what="the end of the database", within_seconds=60)
    wait_for(lambda: not list(tmp_path.glob("sideline-test-*")), what="an empty directory")
