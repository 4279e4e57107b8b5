"""Which message an event carries, so that a message sent twice is applied once (C4, pure).

An id is any bytes of any length. The ledger knows sixteen of them: those of a UUID as it is
usually written, and a digest of everything else.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

from sideline.durations import Duration, seconds
from sideline.errors import ConfigurationError, is_interrupt
from sideline.events import Event
from sideline.keys import canonical

ID_BYTES = 16
# A UUID in lower case with its four dashes. Kept as it is: those of version 7 grow with time, and
# an index takes what grows with half the work.
_TEXT_BYTES = 36
_DASHES = (8, 13, 18, 23)
# Below a minute an id could be gone before its slice is done again; beyond ten years is a mistake.
LEAST_KEEP_SECONDS = 60.0
MOST_KEEP_SECONDS = 3653 * 86_400.0

IdFunction = Callable[[Event], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class MessageId:
    """Where an event's message id stands, and how long ids are remembered.

    ``header`` names a header; where a name stands twice, the last one counts. ``of`` is a function
    of the event in its place: text, bytes, a number, a UUID, a tuple of these, or None. An event
    without an id is not checked.
    """

    header: str = "message-id"
    keep: Duration = "7d"
    of: IdFunction | None = None

    @property
    def keep_seconds(self) -> float:
        """How long ids are remembered."""
        return seconds(self.keep, what="keep of MessageId")


def declared(given: object) -> MessageId | None:
    """What ``dedupe=`` says; ConfigurationError if that is nothing."""
    if given is None:
        return None
    if isinstance(given, MessageId):
        found = given
    elif callable(given) and not isinstance(given, type):
        found = MessageId(of=given)
    else:
        message = f"dedupe is {given!r}; it is MessageId(...) or a function of the event."
        hint = 'Write dedupe=MessageId(header="message-id", keep="7d").'
        raise ConfigurationError(message, hint=hint)
    _check(found)
    return found


def _check(found: MessageId) -> None:
    if not isinstance(found.header, str) or not found.header:
        message = f"the header of MessageId is {found.header!r}; it is the name of a header."
        raise ConfigurationError(message)
    if found.of is not None and (
        not callable(found.of)
        or isinstance(found.of, type)
        or inspect.iscoroutinefunction(found.of)
    ):
        message = f"MessageId(of=) is {found.of!r}; it is an ordinary function of the event."
        raise ConfigurationError(message)
    if not isinstance(found.keep, str | int | float) and not hasattr(found.keep, "total_seconds"):
        message = f"keep of MessageId is {found.keep!r}, which is not a span of time."
        raise ConfigurationError(message, hint="Write it like 12h or 7d.")
    keep = found.keep_seconds
    if not LEAST_KEEP_SECONDS <= keep <= MOST_KEEP_SECONDS:
        message = f"keep of MessageId is {found.keep!r}; it is between a minute and ten years."
        raise ConfigurationError(message, hint="Write it like 12h or 7d.")


def ids_of(
    rule: MessageId, events: Iterable[Event]
) -> tuple[list[bytes | None], dict[int, BaseException]]:
    """The id of each event, None where it has none; and by place, what a function raised."""
    if rule.of is not None:
        return _by_function(rule.of, events)
    return _packed(_headers(rule.header, events)), {}


def _headers(name: str, events: Iterable[Event]) -> list[bytes | None]:
    # Mostly the header is there, and is the first or the only one: three times as quick.
    return [
        headers[0][1]
        if len(headers := event.headers) == 1 and headers[0][0] == name
        else event.header(name)
        for event in events
    ]


def _by_function(
    function: IdFunction, events: Iterable[Event]
) -> tuple[list[bytes | None], dict[int, BaseException]]:
    found: list[bytes | None] = []
    errors: dict[int, BaseException] = {}
    for place, event in enumerate(events):
        try:
            found.append(_said(function(event)))
        # The user's own function, like a handler, SystemExit included.
        except BaseException as error:
            if is_interrupt(error):
                raise
            errors[place] = error
            found.append(None)
    return _packed(found), errors


def _said(value: object) -> bytes | None:
    try:
        return canonical(value)
    except TypeError:
        kind = type(value).__name__
        message = f"dedupe= returned a {kind}; it is text, bytes, a number, a UUID, a tuple, None"
        raise TypeError(message) from None


def _packed(said: list[bytes | None]) -> list[bytes | None]:
    """Ids as the ledger keeps them."""
    if None not in said:
        whole = _uuids(said)  # type: ignore[arg-type]  # no None in it
        if whole is not None:
            return whole  # type: ignore[return-value]  # nobody puts a None into it
    return [None if one is None else digest(one) for one in said]


def _uuids(said: list[bytes]) -> list[bytes] | None:
    """All of them at once, if all are UUIDs as usual; one by one takes four times as long."""
    joined = b"".join(said)
    count = len(said)
    if len(joined) != count * _TEXT_BYTES or not joined.islower():
        return None
    dashes = b"-" * count
    if any(joined[place::_TEXT_BYTES] != dashes for place in _DASHES):
        return None
    try:
        # Blanks are nothing to it: then there are too few bytes.
        packed = bytes.fromhex(joined.replace(b"-", b"").decode())
    except ValueError:
        return None
    if len(packed) != count * ID_BYTES or {len(one) for one in said} != {_TEXT_BYTES}:
        return None
    return [packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)]


def digest(said: bytes) -> bytes:
    """What stands for one id."""
    if len(said) == _TEXT_BYTES and all(said[place] == ord("-") for place in _DASHES):
        plain = said.replace(b"-", b"")
        if len(plain) == 2 * ID_BYTES and plain == plain.lower():
            try:
                packed = bytes.fromhex(plain.decode("latin-1"))
            except ValueError:
                packed = b""
            if len(packed) == ID_BYTES:
                return packed
    return blake2b(said, digest_size=ID_BYTES, person=b"message-id").digest()
