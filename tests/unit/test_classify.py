"""Whose failure an exception is."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors

from sideline.classify import kind_of, sqlstate_kind
from sideline.errors import NonRecoverable, Recoverable


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("22001", "data"),
        ("22P02", "data"),
        ("23502", "data"),
        ("23505", "data"),
        ("21000", "data"),
        ("P0001", "data"),
        ("44000", "data"),
        ("54000", "data"),
        ("40002", "data"),
        ("08006", "recoverable"),
        ("40001", "recoverable"),
        ("40P01", "recoverable"),
        ("53300", "recoverable"),
        ("55P03", "recoverable"),
        ("57014", "recoverable"),
        ("57P01", "recoverable"),
        ("58030", "recoverable"),
        ("XX000", "recoverable"),
        ("25P03", "recoverable"),
        ("25P04", "recoverable"),
        ("25006", "recoverable"),
        ("42P01", "deployment"),
        ("42501", "deployment"),
        ("3F000", "deployment"),
        ("28P01", "deployment"),
        ("0A000", "deployment"),
        ("99999", "data"),
    ],
)
def test_sqlstate(code, kind):
    """A code decides, and what is not known is the event's own (F1, K10)."""
    assert sqlstate_kind(code) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.UniqueViolation("taken"), "data"),
        (errors.AdminShutdown("restart"), "recoverable"),
        (errors.UndefinedColumn("gone"), "deployment"),
        (psycopg.OperationalError("server closed the connection unexpectedly"), "recoverable"),
        (psycopg.InterfaceError("the connection is closed"), "recoverable"),
        (psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"), "data"),
        (ConnectionResetError(), "recoverable"),
        (TimeoutError(), "recoverable"),
        (Recoverable("later"), "recoverable"),
        (NonRecoverable("never"), "data"),
        (KeyError("name"), "data"),
        (OSError("disk"), "data"),
    ],
)
def test_exceptions(error, kind):
    """One class can be both: the code decides, not the class alone (F1)."""
    assert kind_of(error) == kind
