"""Processes that outlive us, and are never taken for another (E2)."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sideline.stack import processes
from sideline.stack.processes import Identity, User
from tests.support.waiting import wait_for

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def spawn(tmp_path):
    """Start a shell script detached; it is killed when the test ends."""
    begun = []

    def start(script: str, user: User | None = None) -> Identity:
        process = processes.spawn(
            ["/bin/sh", "-c", script],
            log=tmp_path / "log",
            environ=os.environ,
            directory=Path("/"),
            user=user,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        processes.end(process, how=signal.SIGKILL, within_seconds=10)


def _said(tmp_path: Path, words: str) -> None:
    wait_for(lambda: words in (tmp_path / "log").read_text(), what=words)


def test_a_detached_process_is_nobodys_child(spawn, tmp_path):
    """It has a session of its own, no terminal, and writes to its log (E2)."""
    process = spawn("echo out; echo err >&2; read x || echo no input; exec sleep 60")
    _said(tmp_path, "out\nerr\nno input\n")
    assert process.alive
    assert os.getsid(process.pid) == process.pid
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


def test_it_ends_when_asked(spawn):
    """SIGTERM suffices for a process that obeys (E2)."""
    process = spawn("exec sleep 60")
    assert processes.end(process, how=signal.SIGTERM, within_seconds=10)
    assert not process.alive


def test_it_is_killed_when_it_does_not_listen(spawn, tmp_path):
    """A process that ignores the signal is killed after its time (E2)."""
    process = spawn("trap '' TERM; echo deaf; while :; do sleep 1; done")
    _said(tmp_path, "deaf")
    assert not processes.end(process, how=signal.SIGTERM, within_seconds=0.1)
    assert not process.alive


def test_a_pid_that_was_given_to_somebody_else_is_left_alone(spawn):
    """A remembered pid with another start belongs to a stranger: no signal reaches it (E2)."""
    stranger = spawn("exec sleep 60")
    remembered = Identity(stranger.pid, "another-boot/1")
    assert not remembered.alive
    assert processes.end(remembered, how=signal.SIGKILL, within_seconds=1)
    assert stranger.alive


def test_a_process_that_waits_for_its_parent_counts_as_dead():
    """A zombie runs no more, although its pid is still there (E2)."""
    child = subprocess.Popen(["/bin/true"])
    with child:
        wait_for(lambda: processes.started(child.pid) is None, what="the child's end")
        os.kill(child.pid, 0)


def test_a_command_that_cannot_start_counts_as_dead(tmp_path):
    """What cannot be started says so in its log (E2)."""
    process = processes.spawn(
        [tmp_path / "missing"], log=tmp_path / "log", environ={}, directory=tmp_path
    )
    _said(tmp_path, "cannot start")
    assert processes.wait_ended(process, 10)


def test_names_with_blanks_and_brackets_do_not_confuse(tmp_path):
    """The kernel writes a command's name between brackets, whatever it holds (E2)."""
    odd = tmp_path / "a) S (b 1"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "60"]) as child:
        wait_for(lambda: processes.command_name(child.pid) == odd.name, what="its name")
        ours = processes.started(os.getpid())
        theirs = processes.started(child.pid)
        child.kill()
    assert ours
    assert theirs
    assert int(ours.rpartition("/")[2]) <= int(theirs.rpartition("/")[2])


@needs_root
@pytest.mark.parametrize("reach", [True, False])
def test_root_becomes_somebody_without_rights(spawn, tmp_path, reach):
    """Another user, no groups, no way back; only with ``reach`` through root's directories (E2)."""
    nobody = pwd.getpwnam("nobody")
    secret = tmp_path / "closed" / "file"
    secret.parent.mkdir(mode=0o700)
    secret.write_text("seen")
    script = f"id -u; cat '{secret}'; echo x > '{secret}'; echo end"
    spawn(script, User(nobody.pw_uid, nobody.pw_gid, reach=reach))
    _said(tmp_path, "end\n")
    lines = (tmp_path / "log").read_text()
    assert lines.startswith(f"{nobody.pw_uid}\n")
    assert ("seen" in lines) is reach
    assert secret.read_text() == "seen", "reach is no right to write"


@needs_root
def test_everything_but_the_reach_is_given_up(tmp_path):
    """Of root's rights none stays that is not needed (E2)."""
    nobody = pwd.getpwnam("nobody")
    for reach, most in ((False, 0), (True, 1)):
        command = processes.launched(
            ["/bin/grep", "CapEff", "/proc/self/status"],
            log=None,
            user=User(nobody.pw_uid, nobody.pw_gid, reach=reach),
        )
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert int(said.split()[1], 16).bit_count() <= most


def test_the_launcher_needs_nothing_of_ours():
    """It runs isolated from the environment: no package of ours, no user's site (E2)."""
    launcher = Path(processes.__file__).with_name("launch.py")
    assert "sideline" not in launcher.read_text()
    said = subprocess.run(
        [sys.executable, "-I", launcher, "--", "/bin/echo", "--log", "x"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "--log x\n"


# The command, and a child of it that does the work and says so.
_WORK = """
sh -c 'echo $$ > pid; mv pid begun; while [ ! -e go ]; do sleep 0.02; done; echo done > done' &
wait
"""
# Interrupts are not ignored, as they are where the tests run in the background.
_FINISH = """
import os, pathlib, signal, sys
from sideline.stack import processes
signal.signal(signal.SIGINT, signal.default_int_handler)
command = ["/bin/sh", "-c", sys.argv[1]]
processes.finish(command, environ=os.environ, directory=pathlib.Path.cwd())
"""


@pytest.fixture
def finishing(tmp_path):
    """Somebody who sees a command through to its end, in the midst of it."""
    with subprocess.Popen(
        [sys.executable, "-c", _FINISH, _WORK],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for((tmp_path / "begun").exists, what="the command under way")
        yield process
        (tmp_path / "go").touch()


def test_an_interrupt_waits_for_what_a_command_has_begun(tmp_path, finishing):
    """Killed, a command would leave its children behind, at work in a directory given up (E2)."""
    finishing.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        # Not a wait for the work: it goes on until it is told to end.
        finishing.communicate(timeout=0.5)
    (tmp_path / "go").touch()
    _, said = finishing.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert (tmp_path / "done").exists()


def test_a_second_interrupt_ends_the_command_and_its_children(tmp_path, finishing):
    """Whoever does not want to wait does not have to, and nothing runs on (E2)."""
    finishing.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        finishing.communicate(timeout=0.5)
    finishing.send_signal(signal.SIGINT)
    _, said = finishing.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    child = int((tmp_path / "begun").read_text())
    wait_for(lambda: processes.started(child) is None, what="the end of the child")
    assert not (tmp_path / "done").exists()
