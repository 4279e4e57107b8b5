"""The example that calls the outside world, against a service that is sometimes away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sideline import NonRecoverable, Recoverable, loading
from sideline.testing import event, run_slice

WELCOME = Path(__file__).resolve().parents[2] / "examples" / "welcome.py"


class Mailer(ThreadingHTTPServer):
    """Answers with the codes that it was given, then with 200."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.codes: list[int] = []
        self.keys: list[str] = []


class _Answer(BaseHTTPRequestHandler):
    server: Mailer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.append(self.headers["Idempotency-Key"])
        self.send_response(self.server.codes.pop(0) if self.server.codes else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def mailer(monkeypatch) -> Iterator[Mailer]:
    with Mailer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("WELCOME_URL", f"http://127.0.0.1:{server.server_port}/")
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def greet():
    pipeline = loading.load(f"{WELCOME}:welcome")
    user = event({"id": "17", "name": "Zoë"}, key="17", topic="users", offset=5)
    return lambda: run_slice(pipeline, [user])


def test_a_call_carries_the_events_id(mailer, greet):
    """The receiver can tell a repeated call by its key (C2)."""
    assert not greet().failures
    assert not greet().failures
    assert mailer.keys == ["users/0/5", "users/0/5"]


@pytest.mark.parametrize(("code", "kind"), [(503, Recoverable), (422, NonRecoverable)])
def test_answers_are_told_apart(mailer, greet, code, kind):
    """A service in trouble is waited for; a refusal is the event's own (F1)."""
    mailer.codes = [code]
    result = greet()
    assert isinstance(result.failures[0].error, kind)
    assert bool(result.recoverable) is (kind is Recoverable)


def test_a_service_that_is_away_is_waited_for(monkeypatch, greet):
    """Nobody listens: that heals (F1)."""
    monkeypatch.setenv("WELCOME_URL", "http://127.0.0.1:1/")
    assert greet().recoverable == {0}
