"""Whom an alert is told: a command of the user's, a webhook.

Each has a thread of its own and a bounded queue: whoever raises an alert waits for nobody. What
could not be told is logged; the ledger knows it in any case.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import queue
import signal
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

import orjson

from sideline.alerts import Alerting
from sideline.masking import mask_command, mask_text, mask_webhook

QUEUE_LENGTH = 100
TRIES = 3
PAUSE_SECONDS = 2.0
TIMEOUT_SECONDS = 10.0
# A run that ends waits so long for what it has just raised.
FAREWELL_SECONDS = 5.0
SCHEMES = ("http", "https")

log = logging.getLogger(__name__)

Notice = Mapping[str, Any]


class NotTold(Exception):  # noqa: N818 - a result
    """Why a hook did not take a notice; never with a secret in it."""


class Target(Protocol):
    """Somebody who can be told."""

    name: str

    def tell(self, body: bytes) -> None:
        """Tell, or raise NotTold."""
        ...

    def give_up(self) -> None:
        """End what is still under way."""
        ...


def hooks_of(alerting: Alerting) -> list[Hook]:
    """Those that the settings name."""
    targets: list[Target] = []
    if alerting.command:
        targets.append(Command(alerting.command))
    if alerting.webhook:
        targets.append(Webhook(alerting.webhook))
    return [Hook(target) for target in targets]


class Hook:
    """Tells one target, one notice after the other, in a thread of its own."""

    def __init__(self, target: Target, *, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._target = target
        self._pause_seconds = pause_seconds
        self._waiting: queue.Queue[Notice | None] = queue.Queue(QUEUE_LENGTH)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, notice: Notice) -> None:
        """Have it told, soon; returns at once."""
        try:
            self._waiting.put_nowait(notice)
        except queue.Full:
            log.warning("%s is too slow; it is not told of: %s", self._target.name, _line(notice))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sideline-hook", daemon=True)
            self._thread.start()

    def close(self, within_seconds: float = FAREWELL_SECONDS) -> None:
        """Wait a little for what was sent, then leave the rest."""
        if self._thread is None:
            return
        done = self._waiting.all_tasks_done
        with done:
            done.wait_for(lambda: not self._waiting.unfinished_tasks, within_seconds)
            left = self._waiting.unfinished_tasks
        self._ending.set()
        if left:
            log.warning("%s was not told of %d alerts before the end", self._target.name, left)
            self._target.give_up()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _run(self) -> None:
        while not self._ending.is_set():
            notice = self._waiting.get()
            try:
                if notice is not None:
                    self._tell(notice)
            finally:
                self._waiting.task_done()

    def _tell(self, notice: Notice) -> None:
        body = orjson.dumps(notice, option=orjson.OPT_UTC_Z)
        for attempt in range(1, TRIES + 1):
            try:
                self._target.tell(body)
            except NotTold as error:
                log.warning(
                    "%s was not told (try %d of %d): %s: %s",
                    *(self._target.name, attempt, TRIES, error, _line(notice)),
                )
            # Nothing that a hook does ends the thread that the next alert needs.
            except Exception as error:  # noqa: BLE001
                log.warning("%s failed with %s", self._target.name, type(error).__name__)
            else:
                return
            if attempt == TRIES or self._ending.wait(self._pause_seconds * attempt):
                return


class Command:
    """A program that gets the notice as JSON on its standard input; never through a shell."""

    def __init__(self, words: tuple[str, ...], *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.name = f"the alert command {mask_command(words)!r}"
        self._words = words
        self._timeout = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def tell(self, body: bytes) -> None:
        """Run it to its end."""
        # A file, not a pipe: what the command leaves behind may hold a pipe open for ever.
        with tempfile.TemporaryFile() as said:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - what the user configured
                    self._words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    # Ctrl-C of the run is not for it; and its children end with it.
                    start_new_session=True,
                )
            except OSError as error:
                raise NotTold(f"it cannot be started: {error.strerror}") from None
            try:
                self._process.communicate(body, timeout=self._timeout)
            except subprocess.TimeoutExpired:
                self.give_up()
                raise NotTold(f"it took longer than {self._timeout:g} s") from None
            code = self._process.returncode
            if code:
                said.seek(0)
                words = said.read(4096).decode(errors="replace").split()
                raise NotTold(f"exit code {code}: {mask_text(' '.join(words))[:300]}")

    def give_up(self) -> None:
        """End it, and whatever it started."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _NoDetour(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET: it would look told, and nobody would know."""

    def redirect_request(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - urllib's signature
        return None


class Webhook:
    """An address on the network that takes the notice as a POST of JSON."""

    def __init__(self, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.name = f"the alert webhook {mask_webhook(url)}"
        self._url, self._headers = _split_secrets(url)
        self._timeout = timeout_seconds
        self._opener = urllib.request.build_opener(_NoDetour)

    def tell(self, body: bytes) -> None:
        """Post it; an answer of the 200s is a yes."""
        # The settings have refused every other scheme.
        request = urllib.request.Request(  # noqa: S310
            self._url, data=body, headers=self._headers, method="POST"
        )
        try:
            self._opener.open(request, timeout=self._timeout).close()
        except urllib.error.HTTPError as error:
            error.close()
            raise NotTold(f"it answered {error.code}") from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or type(error.reason).__name__
            raise NotTold(f"it was not reached: {reason}") from None
        except TimeoutError:
            raise NotTold(f"no answer within {self._timeout:g} s") from None
        # By its type only: http.client's errors quote the address.
        except Exception as error:  # noqa: BLE001
            raise NotTold(type(error).__name__) from None

    def give_up(self) -> None:
        """Nothing to end: the thread goes with the process."""


def _split_secrets(url: str) -> tuple[str, dict[str, str]]:
    """The address and the headers; urllib does not understand ``user:password@host``."""
    headers = {"Content-Type": "application/json", "User-Agent": "sideline"}
    parts = urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    if at:
        token = base64.b64encode(unquote(userinfo).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
    return urlunsplit(parts._replace(netloc=host, fragment="")), headers


def _line(notice: Notice) -> str:
    return " ".join(str(notice.get(part) or "") for part in ("event", "kind", "subject", "message"))
