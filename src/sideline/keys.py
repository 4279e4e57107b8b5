"""Keys as the ledger knows them: any bytes of any length, by a digest (pure)."""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b
from uuid import UUID
from zlib import crc32

import orjson

# A record's own key and one that the pipeline's key= says are never the same key.
_KAFKA = b"k"
_DERIVED = b"d"
_DIGEST_BYTES = 16


def digest(data: bytes, *, derived: bool) -> UUID:
    """What stands for a key in the ledger: of the record, or derived by the pipeline's ``key=``."""
    return UUID(hex=digest_text(data, derived=derived))


def digest_text(data: bytes, *, derived: bool) -> str:
    """The same as PostgreSQL reads it: for the many keys of a slice a UUID each is too dear."""
    kind = _DERIVED if derived else _KAFKA
    return blake2b(kind + data, digest_size=_DIGEST_BYTES).hexdigest()


def mark(data: bytes) -> int:
    """Four bytes of a key, quickly: one that has no mark of those aside is not aside."""
    return crc32(data)


def signed(marked: int) -> int:
    """A mark as PostgreSQL keeps it."""
    return marked - (1 << 32) if marked >> 31 else marked


def marks_of(packed: bytes) -> set[int]:
    """Marks as PostgreSQL packs them, four bytes each, the highest first."""
    found = array("I", packed)
    if sys.byteorder == "little":
        found.byteswap()
    return set(found)


def canonical(key: object) -> bytes | None:
    """What ``key=`` returned, as the ledger writes it down; None: the event stands alone.

    The same in every process and every version, so no ``repr`` and no hash. A number and its
    digits are one key: whoever returns both means the same aggregate.
    """
    if key is None:
        return None
    if isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, int | UUID) and not isinstance(key, bool):
        return str(key).encode()
    if isinstance(key, tuple):
        return orjson.dumps([_part(part) for part in key])
    message = f"key= returned a {type(key).__name__}; it is text, bytes, a number, a UUID, a tuple"
    raise TypeError(message)


def _part(part: object) -> str | None:
    data = canonical(part)
    # Latin-1 has a character for every byte.
    return None if data is None else data.decode("latin-1")
