"""Python values as PostgreSQL reads them (pure).

Values travel as text, a whole column as one array literal, and the column's own type reads
them: nothing is ever sent as something narrower than it is, what does not fit is an error of
PostgreSQL, and one row or 5,000 are the same statement.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import orjson
from psycopg.types.json import Json, Jsonb

from sideline.arrays import all_quoted, quoted
from sideline.homes.tables import Column

_INTEGERS = frozenset({"int2", "int4", "int8"})
_JSON = frozenset({"json", "jsonb"})
_NONE = type(None)


def column_literal(column: Column, values: Sequence[Any]) -> str:
    """An array literal with one element for each value."""
    kinds = set(map(type, values))
    if kinds == {str}:
        return all_quoted(values)
    if kinds == {int} and column.category in "NS":
        return "{" + str(list(values))[1:-1] + "}"
    texts = [None if value is None else text_of(column, value) for value in values]
    if kinds <= {int, bool, _NONE}:
        return "{" + ",".join(["NULL" if text is None else text for text in texts]) + "}"
    if _NONE not in kinds:
        return all_quoted(texts)  # type: ignore[arg-type]  # no None in it
    return "{" + ",".join(["NULL" if text is None else quoted(text) for text in texts]) + "}"


def text_of(column: Column, value: Any) -> str:  # noqa: ANN401 - whatever the handler put there
    """The value as the column's type reads it; raises TypeError for what it never could.

    Only one thing is decided here that PostgreSQL would decide otherwise, or not at all: a
    number with a fraction is not rounded into an integer column, and a number is no time.
    """
    kind = type(value)
    if kind is str:
        return value  # type: ignore[no-any-return]
    convert = _BY_TYPE.get(kind) or _by_ancestor(value)
    if convert is None:
        raise _misfit(column, value)
    return convert(column, value)


def _misfit(column: Column, value: object) -> TypeError:
    return TypeError(f"column {column.name} cannot take a value of type {type(value).__name__}")


def _number(column: Column, value: Any) -> str:  # noqa: ANN401 - int
    if column.category in "DT":
        raise _misfit(column, value)
    return int.__repr__(value)


def _fraction(column: Column, value: Any) -> str:  # noqa: ANN401 - float or Decimal
    if column.category in "DT":
        raise _misfit(column, value)
    # JSON knows one kind of number: 3.0 is an integer, 3.5 is not and is refused as such.
    if column.type in _INTEGERS and Decimal(value).is_finite() and value == int(value):
        return int.__repr__(int(value))
    return str(value)


def _boolean(column: Column, value: Any) -> str:  # noqa: ANN401 - bool
    if column.category in "DT":
        raise _misfit(column, value)
    return "true" if value else "false"


def _bytes(column: Column, value: Any) -> str:  # noqa: ANN401 - bytes and its like
    if column.type != "bytea":
        raise _misfit(column, value)
    return "\\x" + bytes(value).hex()


def _datetime(column: Column, value: Any) -> str:  # noqa: ANN401 - datetime
    # A column without time zone would drop the offset without a word.
    if value.tzinfo is not None and column.type == "timestamp":
        value = value.astimezone(UTC).replace(tzinfo=None)
    return datetime.isoformat(value)


def _isoformat(_column: Column, value: Any) -> str:  # noqa: ANN401 - date or time
    return value.isoformat()  # type: ignore[no-any-return]


def _timedelta(_column: Column, value: Any) -> str:  # noqa: ANN401 - timedelta
    return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"


def _string(_column: Column, value: Any) -> str:  # noqa: ANN401 - what str() says exactly
    return str(value)


def _document(column: Column, value: Any) -> str:  # noqa: ANN401 - dict
    if column.type not in _JSON:
        raise _misfit(column, value)
    return json_text(value)


def _list(column: Column, value: Any) -> str:  # noqa: ANN401 - list or tuple
    if column.type in _JSON:
        return json_text(value)
    if column.category != "A":
        raise _misfit(column, value)
    return "{" + ",".join([_element(item) for item in value]) + "}"


def _element(item: Any) -> str:  # noqa: ANN401 - an array's element
    if item is None:
        return "NULL"
    if isinstance(item, list | tuple):
        return "{" + ",".join([_element(inner) for inner in item]) + "}"
    if isinstance(item, dict):
        return quoted(json_text(item))
    return quoted(text_of(_ELEMENT, item))


def _json(column: Column, value: Any) -> str:  # noqa: ANN401 - psycopg's wrapper
    return _document(column, value.obj)


def _enum(column: Column, value: Any) -> str:  # noqa: ANN401 - Enum
    return text_of(column, value.value)


def json_text(value: Any) -> str:  # noqa: ANN401 - anything JSON can say
    """The value as JSON; a NaN stays one, so that PostgreSQL refuses it."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value)
    # orjson writes NaN as null: a different value. Only then the slower way is worth it.
    if "null" in text:
        return json.dumps(value, default=_plain)
    return text


def _plain(value: object) -> object:
    """What orjson writes and json does not."""
    return orjson.loads(orjson.dumps(value))


_BY_TYPE: dict[type, Callable[[Column, Any], str]] = {
    int: _number,
    float: _fraction,
    Decimal: _fraction,
    bool: _boolean,
    bytes: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    datetime: _datetime,
    date: _isoformat,
    time: _isoformat,
    timedelta: _timedelta,
    UUID: _string,
    dict: _document,
    list: _list,
    tuple: _list,
    Json: _json,
    Jsonb: _json,
    ipaddress.IPv4Address: _string,
    ipaddress.IPv6Address: _string,
    ipaddress.IPv4Interface: _string,
    ipaddress.IPv6Interface: _string,
    ipaddress.IPv4Network: _string,
    ipaddress.IPv6Network: _string,
}


def _by_ancestor(value: object) -> Callable[[Column, Any], str] | None:
    """How to write a value of a derived class."""
    if isinstance(value, Enum):
        return _enum
    if isinstance(value, str):
        return lambda _column, text: str.__str__(text)
    return next((_BY_TYPE[cls] for cls in type(value).__mro__ if cls in _BY_TYPE), None)


# Elements of an array are read by the element's type, which the text alone must satisfy.
_ELEMENT = Column(
    name="(an array's element)",
    type="bytea",
    stage="text",
    cast=None,
    category="S",
    typmod=-1,
    not_null=False,
    required=False,
    writable=True,
    domain=False,
    indexed=False,
    deterministic=True,
    labels=frozenset(),
)
