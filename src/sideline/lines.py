"""Lines of JSON that can be published: those of an export, or plain values (pure)."""

from __future__ import annotations

import base64
import binascii
from typing import Any, NamedTuple

import orjson

from sideline.events import Headers

LONGEST_LINE = 96 << 20
"""Bytes. A record of 64 MB has 90 MB in base64."""
_FIELDS = ("key", "value", "headers")


class BadLineError(ValueError):
    """Why a line cannot be published, as the end of a sentence."""


class Line(NamedTuple):
    """A record as a line says it."""

    key: bytes | None
    value: bytes | None
    headers: Headers | None
    timestamp_ms: int | None
    """None where the line has none."""


def record(line: bytes, *, keyless: bool = False) -> Line:
    """A line as `sideline parked export` writes it: the record exactly."""
    data = _json(line)
    if not isinstance(data, dict) or not all(field in data for field in _FIELDS):
        text = "is not a line of an export: an object with key, value and headers"
        raise BadLineError(text)
    key = _bytes(data["key"], "key")
    if key is None and not keyless:
        raise BadLineError("has no key")
    headers = data["headers"]
    if not isinstance(headers, list) or not all(map(_is_pair, headers)):
        raise BadLineError("has headers that are not a list of pairs")
    return Line(
        key,
        _bytes(data["value"], "value"),
        tuple((name, _bytes(value, f"header {name!r}")) for name, value in headers),
        _timestamp(data.get("timestamp_ms")),
    )


def value(line: bytes, *, key_field: str | None) -> Line:
    """A line that is the value itself; its bytes are published as they stand."""
    data = _json(line)
    if key_field is None:
        return Line(None, line, None, None)
    if not isinstance(data, dict):
        raise BadLineError(f"is not an object, so it has no field {key_field!r} for the key")
    match data.get(key_field):
        case str() as text if text:
            return Line(text.encode(), line, None, None)
        case bool() | None:
            found = "has no key"
        case int() as number:
            return Line(str(number).encode(), line, None, None)
        case _:
            found = "has a key that is neither text nor a whole number"
    raise BadLineError(f"{found} in field {key_field!r}")


def _json(line: bytes) -> Any:  # noqa: ANN401 - whatever the line says
    if len(line) > LONGEST_LINE:
        raise BadLineError(f"is longer than {LONGEST_LINE:,} bytes")
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadLineError(f"is not JSON: {error.msg} in column {error.colno}") from None


def _is_pair(header: object) -> bool:
    match header:
        case [str() as name, None | str()]:
            # librdkafka would cut it off there.
            return "\0" not in name
        case _:
            return False


def _bytes(text: object, what: str) -> bytes | None:
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)  # type: ignore[arg-type]  # told by the error
    except (binascii.Error, TypeError, ValueError):
        raise BadLineError(f"has a {what} that is not base64") from None


def _timestamp(found: object) -> int | None:
    # -1: it had none. 0 would mean "now" to librdkafka, so it cannot be kept.
    if found is None or (type(found) is int and found in {-1, 0}):
        return None
    if type(found) is not int or not 0 < found < 2**63:
        raise BadLineError("has a timestamp_ms that is not a time in milliseconds")
    return found
