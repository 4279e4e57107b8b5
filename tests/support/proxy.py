"""A wire between a worker and PostgreSQL that a test can cut at any byte.

It understands just enough of the protocol to tell sessions by their application_name, to see a
COMMIT go by, and to give the process id of the greeting another value, as poolers do.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_STARTUP_CODES = {80877102, 80877103, 80877104}  # cancel, SSL and GSS requests
_COMMIT = b"COMMIT"


class Cut(Exception):  # noqa: N818 - what the test asked for
    """The wire is cut here."""


class Plan:
    """When to cut the wires of sessions whose application_name begins with ``who``."""

    def __init__(
        self,
        *,
        before_commit: int | None = None,
        after_commit: int | None = None,
        at_byte: int | None = None,
        every: int | None = None,
        who: str = "sideline worker",
        fake_pid: bool = False,
    ) -> None:
        self.before_commit = before_commit
        self.after_commit = after_commit
        self.at_byte = at_byte or every
        self.every = every
        """Cut again and again, about so many bytes apart."""
        self.who = who
        self.fake_pid = fake_pid
        self.cuts = 0
        self.commits = 0
        self.bytes = 0
        self.lock = threading.Lock()


class Proxy:
    """Listens on loopback; hands on to the server of a URL."""

    def __init__(self, url: str, plan: Plan) -> None:
        self.plan = plan
        parts = conninfo_to_dict(url)
        self._server = (str(parts["host"]), int(parts["port"] or 5432))
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = make_conninfo(
            url, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable"
        )
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Cut everything."""
        # A close alone does not wake the thread that accepts.
        for one in (self._listener, *self._sockets):
            _cut(one)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()
                continue
            for one in (client, server):
                # Many small messages, each waiting for its answer.
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(one)
            wire = _Wire(client, server, self.plan)
            for work in (wire.forward, wire.back):
                thread = threading.Thread(target=work, daemon=True)
                self._threads.append(thread)
                thread.start()


class _Wire:
    """One session."""

    def __init__(self, client: socket.socket, server: socket.socket, plan: Plan) -> None:
        self._client, self._server, self._plan = client, server, plan
        self._watched = False
        self._hold_answer = threading.Event()

    def forward(self) -> None:
        """From the client to the server, message by message."""
        try:
            self._start()
            while True:
                kind = _read(self._client, 1)
                head = _read(self._client, 4)
                body = _read(self._client, struct.unpack("!i", head)[0] - 4)
                self._send(kind + head + body, is_commit=kind == b"Q" and body[:6] == _COMMIT)
        except (Cut, OSError, EOFError):
            self._end()

    def back(self) -> None:
        """From the server to the client, as it comes."""
        try:
            while data := self._server.recv(65536):
                if self._plan.fake_pid:
                    data = _fake_pid(data)
                if self._hold_answer.is_set():
                    # The server has answered the COMMIT; the client will never know.
                    break
                self._client.sendall(data)
        except OSError:
            pass
        self._end()

    def _start(self) -> None:
        head = _read(self._client, 4)
        body = _read(self._client, struct.unpack("!i", head)[0] - 4)
        if struct.unpack("!i", body[:4])[0] not in _STARTUP_CODES:
            self._watched = f"application_name\0{self._plan.who}".encode() in body
        self._server.sendall(head + body)

    def _send(self, data: bytes, *, is_commit: bool) -> None:
        plan = self._plan
        if not self._watched:
            self._server.sendall(data)
            return
        with plan.lock:
            plan.commits += is_commit
            commit = plan.commits if is_commit else None
            room = None if plan.at_byte is None else plan.at_byte - plan.bytes
            plan.bytes += len(data)
        if room is not None and 0 <= room < len(data):
            self._server.sendall(data[:room])
            self._cut()
        if commit is not None and commit == plan.before_commit:
            self._cut()
        if commit is not None and commit == plan.after_commit:
            self._plan.cuts += 1
            self._hold_answer.set()
        self._server.sendall(data)

    def _cut(self) -> None:
        plan = self._plan
        plan.cuts += 1
        if plan.every is not None:
            with plan.lock:
                plan.at_byte = plan.bytes + random.randrange(plan.every // 2, 2 * plan.every)
        raise Cut

    def _end(self) -> None:
        for one in (self._client, self._server):
            _cut(one)


def _cut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _read(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _fake_pid(data: bytes) -> bytes:
    """BackendKeyData is 'K', its length 12, the process id, a secret."""
    at = data.find(b"K\0\0\0\x0c")
    return data if at < 0 else data[: at + 5] + struct.pack("!i", 424242) + data[at + 9 :]


@contextlib.contextmanager
def wire(url: str, **plan: Any) -> Iterator[Proxy]:
    """A proxy in front of a server, for the time of a block."""
    proxy = Proxy(url, Plan(**plan))
    try:
        yield proxy
    finally:
        proxy.close()
