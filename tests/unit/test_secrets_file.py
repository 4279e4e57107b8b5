"""Addresses and passwords on their way to the workers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sideline import settings
from sideline.engine import secrets
from sideline.engine.lease import Lease
from sideline.engine.task import access
from sideline.errors import RefusedError

OURS = "postgresql://me:secret@db:5432/shop"


def lease(**options):
    return Lease("p", 1, 1, (), 0.0, **options)


@pytest.fixture
def here(monkeypatch):
    """A host whose settings name a database."""
    found = settings.Settings(kafka="broker:9092", database=OURS)
    monkeypatch.setattr(settings, "load", lambda: found)


def test_a_host_without_the_file_uses_its_own_settings(here):
    """On a cluster the executors' environment says where to go (E2)."""
    assert access(lease(secrets="/nowhere", database="db:5432/shop")).database == OURS


def test_a_host_that_knows_another_database_writes_nothing(here):
    """Effects never go to another database than the driver's; its password is not told (C3)."""
    with pytest.raises(RefusedError, match="runs with elsewhere:5432/shop") as caught:
        access(lease(secrets="/nowhere", database="elsewhere:5432/shop"))
    assert "secret" not in caught.value.message


def test_what_a_killed_driver_left_is_removed(monkeypatch, tmp_path):
    """A file with passwords outlives its driver only until the next start."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    (tmp_path / f"sideline-run-{nobody}-x").mkdir()
    (tmp_path / f"sideline-run-{os.getpid()}-y").mkdir()
    path = secrets.write(OURS, {})
    assert path.stat().st_mode & 0o077 == 0
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == sorted([path.parent.name, f"sideline-run-{os.getpid()}-y"])
