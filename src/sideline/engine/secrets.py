"""Addresses and passwords on their way to the workers: never in a closure, a plan or a log.

The driver's host has them in a file that only this user can read. Hosts that do not have the file
look into their own settings, and go no further if those name another database.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import orjson

from sideline.engine.worker import Access
from sideline.errors import RefusedError
from sideline.ledger.connection import place

_FOLDER = "sideline-run-"


def write(database: str, kafka: dict[str, Any] | None) -> Path:
    """Keep them in a new file; whoever wrote it removes it with `remove`."""
    _bury()
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
    path = folder / "access.json"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(orjson.dumps({"database": database, "kafka": kafka}))
    return path


def remove(path: Path) -> None:
    """Nobody needs them any more."""
    path.unlink(missing_ok=True)
    path.parent.rmdir()


def find(path: str | None, database: str | None, *, needs_kafka: bool = True) -> Access:
    """From the file, else from this host's settings.

    ``database``: the place of the driver's own, so that no other one is met by mistake.
    """
    if path is not None and Path(path).exists():
        data: dict[str, Any] = orjson.loads(Path(path).read_bytes())
        return Access(data["database"], data["kafka"] or {})
    from sideline import settings  # noqa: PLC0415 - only on a cluster's executors

    found = settings.load()
    known = found.require_database()
    if database not in {None, place(known)}:
        message = (
            f"this host's settings name the database {place(known)}, "
            f"but the pipeline runs with {database}."
        )
        hint = "Set SIDELINE_DATABASE on the executors to the database of the pipeline."
        raise RefusedError(message, hint=hint)
    return Access(known, found.kafka_client() if needs_kafka or found.kafka else {})


def _bury() -> None:
    """Remove what drivers left behind that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        try:
            ours = folder.stat(follow_symlinks=False).st_uid == os.getuid()
        except FileNotFoundError:
            # Its driver ended while we looked.
            continue
        if ours and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
