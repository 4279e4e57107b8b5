"""Produces what confluent-kafka's own producer refuses: header names that are not text.

Other clients can: a name is bytes on the wire. This goes to librdkafka directly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

import confluent_kafka

_END, _TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _TIMESTAMP, _HEADERS = 0, 1, 3, 4, 5, 7, 8, 10
_PRODUCER = 0
_COPY = 2
_FLUSH_MS = 30_000

Header = tuple[bytes, bytes | None]


class RawProducer:
    """One producer, for bytes of any kind."""

    def __init__(self, bootstrap: str) -> None:
        libraries = Path(confluent_kafka.__file__).parent.with_suffix(".libs")
        self._lib = ctypes.CDLL(str(next(libraries.glob("librdkafka*"))))
        for name in ("conf_new", "new", "headers_new", "producev"):
            getattr(self._lib, f"rd_kafka_{name}").restype = ctypes.c_void_p
        conf = ctypes.c_void_p(self._lib.rd_kafka_conf_new())
        for name, value in (("bootstrap.servers", bootstrap), ("log_level", "0")):
            self._lib.rd_kafka_conf_set(conf, name.encode(), value.encode(), None, 0)
        self._handle = ctypes.c_void_p(self._lib.rd_kafka_new(_PRODUCER, conf, None, 0))
        assert self._handle.value

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[Header] = (),
        *,
        partition: int = 0,
    ) -> None:
        """Queue a record."""
        lib = self._lib
        made = ctypes.c_void_p(lib.rd_kafka_headers_new(8))
        for name, data in headers:
            size = -1 if data is None else len(data)
            failed = lib.rd_kafka_header_add(
                made, name, ctypes.c_ssize_t(len(name)), data, ctypes.c_ssize_t(size)
            )
            assert not failed
        parts = [
            (_TOPIC, topic.encode()),
            (_PARTITION, ctypes.c_int32(partition)),
            (_VALUE, value, ctypes.c_size_t(len(value or b""))),
            (_KEY, key, ctypes.c_size_t(len(key or b""))),
            (_FLAGS, ctypes.c_int(_COPY)),
            (_HEADERS, made),
        ]
        arguments = [part if i else ctypes.c_int(part) for p in parts for i, part in enumerate(p)]
        error = lib.rd_kafka_producev(self._handle, *arguments, ctypes.c_int(_END))
        assert not error, error

    def close(self) -> None:
        """Send what is queued, and end."""
        assert not self._lib.rd_kafka_flush(self._handle, _FLUSH_MS)
        self._lib.rd_kafka_destroy(self._handle)
