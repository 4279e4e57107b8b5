"""Whose failure an exception is: the event's, the outside world's, or the deployment's (pure)."""

from __future__ import annotations

from typing import Literal

from sideline.errors import Recoverable

Kind = Literal["data", "recoverable", "deployment"]

# By class first, then by code: a code in one of the later sets wins over its class.
_RECOVERABLE_CLASSES = frozenset({"08", "40", "53", "55", "57", "58", "XX"})
_DEPLOYMENT_CLASSES = frozenset(
    {
        "0A",  # a feature that this server does not have
        "28",  # authorisation
        "3D",  # no such database
        "3F",  # no such schema
        "42",  # a name, a right or the syntax
        "F0",  # the server's configuration file
        "HV",  # foreign data wrapper
    }
)
_RECOVERABLE_CODES = frozenset(
    {
        "25006",  # read-only: a failover that is not over yet
        "25P02",  # the transaction was broken by an error that was seen before
        "25P03",  # our own timeouts: the slice took too long
        "25P04",
    }
)
# A deferred constraint at COMMIT: the rows are wrong, not the moment.
_DATA_CODES = frozenset({"40002"})


def sqlstate_kind(code: str) -> Kind:
    """What an error of PostgreSQL says about the event that met it.

    In doubt it is the event's own: waiting would not mend it, and stopping for one row would
    stop everybody.
    """
    if code in _DATA_CODES:
        return "data"
    if code in _RECOVERABLE_CODES or code[:2] in _RECOVERABLE_CLASSES:
        return "recoverable"
    if code[:2] in _DEPLOYMENT_CLASSES:
        return "deployment"
    return "data"


def kind_of(error: BaseException) -> Kind:
    """The kind of any exception; what is not known to heal by itself is the event's own.

    A psycopg error is known by its ``sqlstate``. Without one it never reached the server:
    then a lost connection is an OperationalError or InterfaceError, and everything else is
    a value that could not be sent.
    """
    if isinstance(error, Recoverable):
        return "recoverable"
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str) and state:
        return sqlstate_kind(state)
    # Names, not classes: this module decides and must not import a driver.
    ancestors = {f"{cls.__module__}.{cls.__name__}" for cls in type(error).__mro__}
    if ancestors & {"psycopg.OperationalError", "psycopg.InterfaceError"}:
        return "recoverable"
    if isinstance(error, ConnectionError | TimeoutError):
        return "recoverable"
    return "data"
