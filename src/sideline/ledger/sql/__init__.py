"""The ledger's SQL, read from its files once."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import LiteralString, NamedTuple

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


class Migration(NamedTuple):
    """A numbered step of the schema."""

    number: int
    name: str
    sql: LiteralString


@cache
def queries() -> dict[str, LiteralString]:
    """Every named statement of queries.sql."""
    text = resources.files(__package__).joinpath("queries.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations, in their order."""
    folder = resources.files(__package__).joinpath("migrations")
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    return tuple(
        Migration(
            int(name[:4]),
            name[5:-4],
            folder.joinpath(name).read_text(encoding="utf-8"),
        )
        for name in files
    )
