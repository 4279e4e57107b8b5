"""What Kafka and the ledger say about a partition's last slice, and what follows (pure).

Every slice that publishes has a number. What it changes in the ledger is written down first, as
pending; then Kafka commits its records together with an offset whose metadata is the number; then
the pending changes are applied. Whoever finds some open asks Kafka which of the two came last.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from sideline.errors import UnclearError

Verdict = Literal["agreed", "rewrite", "apply", "drop"]
# Ours, or somebody else's word: other tools write metadata of their own.
_WORD = re.compile(r"sideline/1/([0-9a-f]{1,64})/([0-9]{1,18})", re.ASCII)


class Books(NamedTuple):
    """What the progress row says."""

    mark: str
    """Which ledger it is."""
    next_offset: int
    drawn: int
    """The last number that was drawn: of the pending slice, while there is one."""
    applied: int
    """The number of the last slice that was applied."""
    pending: tuple[int, int] | None = None
    """Where the pending slice begins and ends."""


class Shown(NamedTuple):
    """What Kafka shows: the stable committed offset, and whose number stands beside it."""

    offset: int | None = None
    mark: str | None = None
    number: int | None = None


def word(mark: str, number: int) -> str:
    """The metadata that a slice commits with its offset."""
    return f"sideline/1/{mark}/{number}"


def shown(offset: int, metadata: str | None) -> Shown:
    """What a committed offset says; never raises, whoever wrote it."""
    found = _WORD.fullmatch(metadata or "")
    at = offset if offset >= 0 else None
    return Shown(at) if found is None else Shown(at, found[1], int(found[2]))


def decide(books: Books, kafka: Shown, *, where: str) -> Verdict:
    """What to do before the next slice; UnclearError where the two contradict each other (K19).

    Nothing pending: the progress row is the truth, and is written to Kafka again where Kafka shows
    something else. Pending: Kafka shows the slice itself, or what was before it, and nothing else.
    """
    ours = kafka.mark == books.mark
    if books.pending is None:
        if ours and kafka.number is not None and kafka.number > books.applied:
            raise UnclearError(
                f"partition {where}: Kafka has published slice {kafka.number}, but the ledger "
                f"knows only {books.applied} of them; it was restored from a backup, or somebody "
                "changed it. Going on would publish again what is published.",
                hint="Bring back the newer ledger. Nothing was changed.",
            )
        agreed = kafka == Shown(books.next_offset, books.mark, books.applied)
        return "agreed" if agreed else "rewrite"
    start, end = books.pending
    if kafka == Shown(end, books.mark, books.drawn):
        return "apply"
    if kafka == Shown(start, books.mark, books.applied):
        return "drop"
    raise UnclearError(
        f"partition {where}: whether slice {books.drawn} was published cannot be known. Kafka "
        f"should show offset {end} with number {books.drawn}, or offset {start} with number "
        f"{books.applied}, but shows {_told(kafka, ours=ours)}; somebody reset the offset, or the "
        "broker forgot it.",
        hint="Set the offset back, metadata included, or ask for help. Nothing was deleted.",
    )


def _told(kafka: Shown, *, ours: bool) -> str:
    if kafka.offset is None:
        return "no offset"
    if not ours or kafka.number is None:
        return f"offset {kafka.offset} without a number of this ledger"
    return f"offset {kafka.offset} with number {kafka.number}"
