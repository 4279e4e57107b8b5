"""What a person may publish, made into what Kafka takes; the rest is refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import orjson

from sideline.errors import UsageError

Value = Any
"""Bytes, text, None (a tombstone), or whatever can be JSON."""
HeaderValue = bytes | str | None
GivenHeaders = Mapping[str, HeaderValue] | Iterable[tuple[str, HeaderValue]]

_BUFFERS = (bytes, bytearray, memoryview)
_LATEST_MS = 2**63 - 1


def value_bytes(value: Value) -> bytes | None:
    """The bytes of a value; JSON for what is neither bytes nor text."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        return _text(value, "the value")
    if isinstance(value, _BUFFERS):
        return bytes(value)
    try:
        data = orjson.dumps(value)
    except (TypeError, RecursionError) as error:
        message = f"a value of type {type(value).__name__} cannot be JSON: {error}."
        raise UsageError(message, hint="Give bytes, text, None, or what JSON can hold.") from None
    # What is not a number comes out as null: rather than change it without a word, refuse it.
    if b"null" in data and _has_nan(value):
        raise UsageError("the value holds NaN or an infinity, which JSON cannot hold.")
    return data


def key_bytes(key: bytes | str | None) -> bytes | None:
    """The bytes of a key."""
    if key is None or type(key) is bytes:
        return key
    if isinstance(key, str):
        return _text(key, "the key")
    if isinstance(key, _BUFFERS):
        return bytes(key)
    message = f"a key is bytes or text, not {type(key).__name__}."
    raise UsageError(message, hint="Make text of it: key=str(user_id).")


def headers_list(headers: GivenHeaders) -> list[tuple[str, bytes | None]]:
    """Headers in their order, duplicates kept."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        return [_header(name, value) for name, value in pairs]
    except (TypeError, ValueError) as error:
        message = "headers are a mapping, or pairs of name and value."
        raise UsageError(message, hint='Like headers={"source": "shop"}.') from error


def milliseconds(timestamp: float | datetime | None) -> int:
    """A record's timestamp for librdkafka, to which 0 means: now."""
    if timestamp is None:
        return 0
    if isinstance(timestamp, datetime) and timestamp.tzinfo is None:
        message = "a timestamp needs its time zone."
        raise UsageError(message, hint="Like datetime.now(UTC), or milliseconds since 1970.")
    if isinstance(timestamp, datetime):
        timestamp = round(timestamp.timestamp() * 1000)
    if type(timestamp) is not int or not 0 < timestamp <= _LATEST_MS:
        message = f"the timestamp {timestamp!r} is not one: milliseconds since 1970, or a datetime."
        raise UsageError(message)
    return timestamp


def identity(value: str, what: str) -> str:
    """A message id or a correlation id that was given."""
    if not isinstance(value, str) or not value:
        message = f"{what} must be text that is not empty, not {value!r}."
        raise UsageError(message, hint="Leave it out to have one made.")
    _text(value, what)
    return value


def _header(name: Any, value: Any) -> tuple[str, bytes | None]:  # noqa: ANN401 - checked here
    if not isinstance(name, str):
        message = f"a header's name is text, not {type(name).__name__}."
        raise UsageError(message)
    _text(name, "a header's name")
    if "\0" in name:
        # librdkafka would cut it off there.
        raise UsageError("a header's name holds a NUL character.")
    if value is None or type(value) is bytes:
        return name, value
    if isinstance(value, str):
        return name, _text(value, f"header {name!r}")
    if isinstance(value, _BUFFERS):
        return name, bytes(value)
    message = f"header {name!r} is bytes, text or None, not {type(value).__name__}."
    raise UsageError(message)


def _text(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        message = f"{what} holds half a character (a lone surrogate), which is no text."
        raise UsageError(message, hint="Give bytes, or mend the text.") from None


def _has_nan(value: Any) -> bool:  # noqa: ANN401 - whatever JSON holds
    match value:
        case float():
            return not math.isfinite(value)
        case dict():
            return any(map(_has_nan, value.values()))
        case list() | tuple():
            return any(map(_has_nan, value))
        case _:
            return False
