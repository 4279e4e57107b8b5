"""What is known to heal by itself: codes, statuses, and the names of exception classes (pure).

Libraries are known by the names of their classes and never imported: most are not installed.
"""

from __future__ import annotations

import errno
from typing import Literal

Family = Literal["connection", "status", "kafka", "grpc", "errno", "within"]
"""What is looked at to judge an exception; ``connection``: its class is enough."""

# PostgreSQL: by class first, then by code: a code in one of the later sets wins over its class.
RECOVERABLE_CLASSES = {
    "08": "connection exception",
    "40": "transaction rollback",
    "53": "insufficient resources",
    "55": "object not in the state that is needed",
    "57": "operator intervention",
    "58": "system error",
    "XX": "internal error",
}
DEPLOYMENT_CLASSES = {
    "0A": "feature not supported",
    "28": "authorisation",
    "3D": "no such database",
    "3F": "no such schema",
    "42": "a name, a right or the syntax",
    "F0": "configuration file",
    "HV": "foreign data wrapper",
}
# Said for people only: everything that stands nowhere else is the event's own too.
DATA_CLASSES = {
    "21": "cardinality violation",
    "22": "data exception",
    "23": "constraint violation",
    "44": "check option of a view",
    "54": "program limit exceeded",
    "P0": "raised in the database",
}
RECOVERABLE_CODES = {
    "25006": "read-only: a failover that is not over yet",
    "25P02": "the transaction was broken by an error that was seen before",
    "25P03": "idle in transaction for too long",
    "25P04": "the transaction took too long",
}
# A deferred constraint at COMMIT: the rows are wrong, not the moment.
DATA_CODES = {"40002": "a deferred constraint at COMMIT"}
SQLSTATE_LENGTH = 5

RECOVERABLE_STATUSES = frozenset({429, 502, 503, 504})
"""Too many requests; a gateway without an answer; unavailable; a gateway's timeout."""
RECOVERABLE_GRPC = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
# librdkafka sets its retriable flag for transactions only; these are the protocol's retriable
# codes and the client's own words for a broker that does not answer.
RECOVERABLE_KAFKA = frozenset(
    {
        "BROKER_NOT_AVAILABLE",
        "CONCURRENT_TRANSACTIONS",
        "COORDINATOR_LOAD_IN_PROGRESS",
        "COORDINATOR_NOT_AVAILABLE",
        "KAFKA_STORAGE_ERROR",
        "LEADER_NOT_AVAILABLE",
        "NETWORK_EXCEPTION",
        "NOT_CONTROLLER",
        "NOT_COORDINATOR",
        "NOT_ENOUGH_REPLICAS",
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        "NOT_LEADER_FOR_PARTITION",
        "REPLICA_NOT_AVAILABLE",
        "REQUEST_TIMED_OUT",
        "THROTTLING_QUOTA_EXCEEDED",
        "_ALL_BROKERS_DOWN",
        "_MSG_TIMED_OUT",
        "_QUEUE_FULL",
        "_RESOLVE",
        "_TIMED_OUT",
        "_TIMED_OUT_QUEUE",
        "_TRANSPORT",
        "_WAIT_COORD",
    }
)
_EAI_AGAIN = -3  # socket's own name for it would import socket
RECOVERABLE_ERRNOS = frozenset(
    {
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        _EAI_AGAIN,
    }
)

# Package and class, whatever module of the package the class stands in. Subclasses are named
# where people name them: what is not installed has no ancestors to look at.
_CONNECTION = {
    "": "ConnectionError TimeoutError",
    "aiohttp": "ClientConnectionError ClientConnectorError ClientOSError ClientPayloadError"
    " ConnectionTimeoutError ServerDisconnectedError ServerTimeoutError SocketTimeoutError",
    "botocore": "ConnectTimeoutError ConnectionClosedError ConnectionError"
    " EndpointConnectionError ReadTimeoutError",
    "http": "IncompleteRead RemoteDisconnected",
    "httpcore": "ConnectError ConnectTimeout NetworkError PoolTimeout ReadError ReadTimeout"
    " RemoteProtocolError TimeoutException WriteError WriteTimeout",
    "httpx": "CloseError ConnectError ConnectTimeout NetworkError PoolTimeout ProxyError ReadError"
    " ReadTimeout RemoteProtocolError TimeoutException WriteError WriteTimeout",
    "psycopg": "InterfaceError OperationalError",
    "psycopg2": "InterfaceError OperationalError",
    "psycopg_pool": "PoolTimeout TooManyRequests",
    "redis": "BusyLoadingError ConnectionError TimeoutError",
    "requests": "ChunkedEncodingError ConnectTimeout ConnectionError ProxyError ReadTimeout"
    " SSLError Timeout",
    "smtplib": "SMTPConnectError SMTPServerDisconnected",
    "sqlalchemy": "TimeoutError",
    "ssl": "SSLEOFError SSLZeroReturnError",
    "urllib": "ContentTooShortError",
    "urllib3": "ConnectTimeoutError IncompleteRead NameResolutionError NewConnectionError"
    " ProtocolError ProxyError ReadTimeoutError TimeoutError",
}
_STATUS = {
    "aiohttp": "ClientResponseError",
    "botocore": "ClientError",
    "httpx": "HTTPStatusError",
    "requests": "HTTPError",
    "urllib": "HTTPError",
}
_WITHIN = {
    "sqlalchemy": ("DBAPIError", "orig"),
    "urllib": ("URLError", "reason"),
    "urllib3": ("MaxRetryError", "reason"),
}
_KAFKA = {
    "aiokafka": "KafkaError",
    "cimpl": "KafkaException",  # what confluent-kafka's says of itself
    "confluent_kafka": "KafkaException",
    "kafka": "KafkaError",
}


def _known() -> dict[str, tuple[Family, str]]:
    tables: dict[Family, dict[str, str]] = {
        "connection": _CONNECTION,
        "status": _STATUS,
        "kafka": _KAFKA,
        "grpc": {"grpc": "RpcError"},
        "errno": {"": "OSError"},
    }
    known: dict[str, tuple[Family, str]] = {
        f"{package}.{name}": (family, "")
        for family, table in tables.items()
        for package, names in table.items()
        for name in names.split()
    }
    known |= {f"{package}.{name}": ("within", at) for package, (name, at) in _WITHIN.items()}
    return known


KNOWN = _known()
"""By package and class: the family and, for ``within``, the attribute that holds the error."""
