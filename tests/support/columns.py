"""Columns as the catalogue describes them, without a database."""

from __future__ import annotations

from typing import Any

from sideline.homes.tables import Column

_CATEGORIES = {
    "int2": "N",
    "int4": "N",
    "int8": "N",
    "numeric": "N",
    "float8": "N",
    "bool": "B",
    "timestamptz": "D",
    "timestamp": "D",
    "date": "D",
    "time": "D",
    "interval": "T",
    "text": "S",
    "varchar": "S",
    "bpchar": "S",
}


def column(kind: str, **properties: Any) -> Column:
    """A nullable column of a type that PostgreSQL brings along."""
    described: dict[str, Any] = {
        "name": "c",
        "type": kind,
        "stage": kind,
        "cast": None,
        "category": _CATEGORIES.get(kind, "U"),
        "typmod": -1,
        "not_null": False,
        "required": False,
        "writable": True,
        "domain": False,
        "indexed": False,
        "deterministic": True,
        "labels": frozenset(),
    }
    return Column(**{**described, **properties})


def varchar(length: int, **properties: Any) -> Column:
    """A varchar of that length."""
    return column("varchar", typmod=length + 4, **properties)


def numeric(precision: int, scale: int) -> Column:
    """A numeric of that precision and scale."""
    return column("numeric", typmod=(precision << 16 | scale) + 4)
