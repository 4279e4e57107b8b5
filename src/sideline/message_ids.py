"""Message ids: UUIDs of version 7, which sort by the time at which they were made.

One is made for every record that is published, so it has to be cheap: all that is random, or
depends on the time, is made once a millisecond. Only the last 12 bits count within it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import monotonic, time_ns
from typing import Final

_COUNTS: Final = [b"%03x" % number for number in range(4096)]
_NANOSECONDS: Final = 1_000_000
# Version 7 and the variant, among 80 bits of which all others are random or counted.
_FIXED: Final = 0x7 << 76 | 0x2 << 62
_FREE: Final = ~(0xF << 76 | 0x3 << 62 | 0xFFF)


class Ids:
    """Ids that grow, also when the clock is set back; threads may swap two of them.

    A child process must not go on with its parent's.
    """

    __slots__ = ("millisecond", "series", "until")

    def __init__(self) -> None:
        self.until = 0.0
        """From this moment on, of the monotonic clock, the series is too old."""
        self.millisecond = 0
        # As one: whoever takes the head of the one with a number of the other repeats an id.
        self.series: tuple[bytes, Iterator[bytes]] = b"", iter(())
        """What begins all ids of this millisecond, and the numbers that are left of it.

        Taken from by all threads: each next of an iterator in C is given to one of them only.
        """

    def new(self) -> bytes:
        """A UUIDv7 as a header has it: its millisecond, 62 bits drawn with it, a number in it."""
        if monotonic() >= self.until:
            self.turn()
        head, numbers = self.series
        for number in numbers:
            return head + number
        self.turn()
        return self.new()

    def turn(self) -> None:
        """Begin the next millisecond; with all numbers of one used up, ahead of the clock."""
        # First, so that whoever is held up between the two clocks ends its millisecond too early.
        began = monotonic()
        now = time_ns()
        self.millisecond = max(now // _NANOSECONDS, self.millisecond + 1)
        self.until = began + ((self.millisecond + 1) * _NANOSECONDS - now) / 1e9
        drawn = int.from_bytes(os.urandom(10), "big") & _FREE | _FIXED
        text = f"{self.millisecond << 80 | drawn:032x}"
        head = f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:29]}"
        self.series = head.encode(), iter(_COUNTS)
