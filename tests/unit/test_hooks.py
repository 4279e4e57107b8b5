"""Whom an alert is told: a real program, a real HTTP server, and what they do wrong."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from sideline import hooks
from sideline.alerts import Alerting
from sideline.hooks import Command, Hook, NotTold, Webhook, hooks_of
from tests.support.waiting import wait_for

NOTICE = {
    "event": "raised",
    "pipeline": "login",
    "kind": "parked",
    "subject": "",
    "message": "3 events wait; 1 key is aside.",
    "raised_at": datetime(2026, 1, 31, 12, tzinfo=UTC),
    "cleared_at": None,
}
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def nobody_left():
    """A hook that was given up ends before the next test: its words are not that one's."""
    yield
    for thread in threading.enumerate():
        if thread.name == "sideline-hook":
            thread.join(30)
            assert not thread.is_alive()


class Server:
    """Takes posts; answers as the test says."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.released = threading.Event()
        self.released.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.got.append((self.path, dict(self.headers), body))
                server.released.wait(30)
                self.send_response(server.answers.pop(0) if server.answers else 204)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                server.got.append((self.path, {}, b"a detour"))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def program(code: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *map(str, arguments))


def test_a_command_gets_the_alert_as_json_on_its_standard_input(tmp_path):
    """Whole, in UTC, with nulls where nothing is (S2)."""
    code = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
    file = tmp_path / "told"
    hook = Hook(Command(program(code, file)))
    hook.send(NOTICE)
    hook.close(30)
    assert json.loads(file.read_text()) == NOTICE | {"raised_at": "2026-01-31T12:00:00Z"}


def test_a_command_is_no_shell(tmp_path):
    """Nothing in a message is ever read as a command, nor in the words themselves."""
    target = tmp_path / "made"
    Command(("echo", ";", "touch", str(target), f"$(touch {target})")).tell(b"{}")
    assert not target.exists()


def test_a_command_that_fails_says_why_without_its_password():
    """Its own words on standard error are in the log."""
    code = "import sys; sys.exit('no way to postgresql://me:hunter2@db/x')"
    with pytest.raises(NotTold, match="exit code 1: no way to") as caught:
        Command(program(code)).tell(b"{}")
    assert SECRET not in str(caught.value)


def test_a_command_that_does_not_exist_is_an_answer():
    """The run goes on; the log says what is wrong."""
    with pytest.raises(NotTold, match="cannot be started: No such file"):
        Command(("/nowhere/page",)).tell(b"{}")


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    """Also a grandchild that holds every pipe open."""
    code = (
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(f'{child.pid}\\n')\n"
        "time.sleep(600)\n"
    )
    file = tmp_path / "pid"
    communicate = subprocess.Popen.communicate

    def communicate_later(process, *arguments, **options):
        # Its time counts from when there is a grandchild, however long Python takes to start.
        wait_for(lambda: _has_line(file), what="the grandchild")
        return communicate(process, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_later)
    with pytest.raises(NotTold, match=r"took longer than 0[.]5 s"):
        Command(program(code, file), timeout_seconds=0.5).tell(b"{}")
    pid = int(file.read_text())
    wait_for(lambda: not _runs(pid), what="the end of the grandchild")


def _has_line(file: Path) -> bool:
    return file.exists() and file.read_text().endswith("\n")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_command_that_reads_nothing_is_told_all_the_same():
    """A broken pipe is not its failure."""
    Command(("true",)).tell(b"x" * 1_000_000)


def test_a_webhook_gets_a_post_of_json(server):
    """With its content type (S2)."""
    hook = Hook(Webhook(f"http://{server.host}/alerts?token=1#there"))
    hook.send(NOTICE)
    hook.close(30)
    ((path, headers, body),) = server.got
    assert path == "/alerts?token=1"
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["message"] == NOTICE["message"]


def test_a_password_in_the_address_becomes_a_header(server):
    """urllib does not understand it where people write it."""
    Webhook(f"http://zoey:hun%40ter2@{server.host}/").tell(b"{}")
    ((_, headers, _),) = server.got
    assert headers["Authorization"] == "Basic em9leTpodW5AdGVyMg=="
    assert headers["Host"] == server.host


def test_a_redirect_is_not_followed(server):
    """The post would become a get: told, as it seems, and to somebody else."""
    server.answers = [302]
    with pytest.raises(NotTold, match="answered 302"):
        Webhook(f"http://{server.host}/").tell(b"{}")
    assert len(server.got) == 1


def test_what_failed_is_tried_again_and_logged(server, caplog):
    """Three times; the log names neither path nor password (S2)."""
    server.answers = [500, 503, 500, 204]
    hook = Hook(Webhook(f"http://me:{SECRET}@{server.host}/T000/{SECRET}"), pause_seconds=0.01)
    with caplog.at_level(logging.WARNING, "sideline.hooks"):
        hook.send(NOTICE)
        hook.send(NOTICE | {"message": "second"})
        hook.close(30)
    assert [json.loads(body)["message"] for _, _, body in server.got] == [
        *[NOTICE["message"]] * 3,
        "second",
    ]
    assert "try 3 of 3" in caplog.text
    assert "it answered 503" in caplog.text
    assert "parked" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"http://me:{SECRET}@127.0.0.1:1/{SECRET}", "not reached: Connection refused"),
        (f"http://{SECRET}.invalid./{SECRET}", "not reached"),
        (f"http://h:{SECRET}/", "InvalidURL"),
    ],
)
def test_an_address_that_cannot_be_reached_is_not_spelled_out(url, words):
    """Whatever is wrong with it, its secrets are not in the reason."""
    with pytest.raises(NotTold, match=words) as caught:
        Webhook(url, timeout_seconds=5).tell(b"{}")
    assert SECRET not in str(caught.value)


def test_whoever_raises_an_alert_does_not_wait(server, caplog):
    """A slow webhook keeps nobody; what does not fit into the queue is said (S2)."""
    server.released.clear()
    hook = Hook(Webhook(f"http://{server.host}/", timeout_seconds=60))
    began = time.monotonic()
    for _ in range(hooks.QUEUE_LENGTH + 50):
        hook.send(NOTICE)
    # The first is not answered yet; a tenth of a second for each would be fifteen.
    assert len(server.got) <= 1
    assert time.monotonic() - began < 10
    assert "is too slow; it is not told of: raised parked" in caplog.text
    hook.close(0)
    assert "was not told of" in caplog.text


def test_an_end_does_not_wait_for_a_command_that_hangs(tmp_path):
    """Nor does it leave the command behind."""
    file = tmp_path / "pid"
    code = (
        "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}\\n'); time.sleep(600)"
    )
    hook = Hook(Command(program(code, file), timeout_seconds=600))
    hook.send(NOTICE)
    wait_for(lambda: _has_line(file), what="the command")
    began = time.monotonic()
    hook.close(0.1)
    # Far from the ten minutes that the command takes, on however busy a machine.
    assert time.monotonic() - began < 30
    wait_for(lambda: not _runs(int(file.read_text())), what="the end of the command")


def test_a_hook_that_breaks_is_there_for_the_next_alert(caplog):
    """No exception ends its thread."""
    told = []

    class Broken:
        name = "somebody"

        def tell(self, body: bytes) -> None:
            told.append(body)
            if len(told) <= hooks.TRIES:
                raise RuntimeError(SECRET)

        def give_up(self) -> None:
            pass

    hook = Hook(Broken(), pause_seconds=0)
    hook.send(NOTICE)
    hook.send(NOTICE)
    hook.close(30)
    assert len(told) == hooks.TRIES + 1
    assert "somebody failed with RuntimeError" in caplog.text
    assert SECRET not in caplog.text


def test_hooks_are_those_that_the_settings_name():
    """None, one or both, each with a thread of its own; none before the first alert."""
    before = set(threading.enumerate())
    assert hooks_of(Alerting()) == []
    both = hooks_of(Alerting(command=("page",), webhook="http://hooks.example/x"))
    assert len(both) == 2
    for hook in both:
        hook.close()
    # Not counted: the threads of hooks that were closed before may end meanwhile.
    assert set(threading.enumerate()) <= before


def test_environment_of_a_command_is_the_run_s_own(monkeypatch):
    """A program finds what its user set for it."""
    monkeypatch.setenv("PAGER_TOKEN", "yes")
    Command(program("import os, sys; sys.exit(os.environ['PAGER_TOKEN'] != 'yes')")).tell(b"{}")
