"""Bytes and words from elsewhere, made fit to be shown: nothing in them commands a terminal (pure).

Whatever is not printable (control characters, escape sequences, direction overrides, invisible
ones) is spelled out, on a terminal by a backslash, in JSON by its own escapes.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

NOTHING = "-"
"""No key, or no value: a null is not an empty text."""

_DUMP_BYTES = 16
# UTF-8's longest character: a cut in it leaves at most three bytes of it behind.
_CUT_BYTES = 3
_HIGHEST_BMP = 0xFFFF
# JSON itself spells out what stands below a space.
_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")
_LINE_ENDS = re.compile(r"\r\n|\n")


def words(text: str) -> str:
    """A message in one line."""
    return text if text.isprintable() else "".join(map(_spelled, text))


def lines(text: str) -> list[str]:
    """Text of several lines, each as it is shown."""
    return [words(line.expandtabs(4)) for line in _LINE_ENDS.split(text)]


def paragraph(text: str) -> str:
    """Text whose line ends stay."""
    return "\n".join(lines(text))


def short(text: str, characters: int) -> str:
    """Words of bounded length."""
    shown = words(text)
    return shown if len(shown) <= characters else f"{shown[: characters - 3]}..."


def data(value: bytes | None) -> str:
    """A key or a header in one line: its text if that says it all, quoted, or ``0x`` and hex.

    No two values look the same.
    """
    if value is None:
        return NOTHING
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"0x{value.hex()}"
    return text if _speaks_for_itself(text) else f'"{"".join(map(_quoted, text))}"'


def _speaks_for_itself(text: str) -> bool:
    return (
        text.isprintable()
        and text == text.strip()
        and text not in {"", NOTHING}
        and not text.startswith(('"', "0x"))
        and "\\" not in text
    )


def block(value: bytes, *, cut: bool = False) -> list[str]:
    """A value: the lines of its text, or a dump where it is none.

    ``cut``: it was shortened, maybe inside a character.
    """
    text = _text(value)
    if text is None and cut:
        # What was cut off may be the rest of a character.
        shorter = (_text(value[:-count]) for count in range(1, _CUT_BYTES + 1))
        text = next((found for found in shorter if found is not None), None)
    return _dump(value) if text is None else lines(text)


def _text(value: bytes) -> str | None:
    """The value as text, if it is some: a dump of one odd character helps nobody."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return text if _is_text(text) else None


def _is_text(text: str) -> bool:
    return text.translate({9: None, 10: None, 13: None}).isprintable()


def _dump(value: bytes) -> list[str]:
    rows = []
    for start in range(0, len(value), _DUMP_BYTES):
        part = value[start : start + _DUMP_BYTES]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)  # noqa: PLR2004
        rows.append(f"{start:08x}  {part.hex(' '):<{3 * _DUMP_BYTES}} {letters}")
    return rows


def as_json(value: bytes | None) -> dict[str, str] | None:
    """Bytes in ``--json``: ``{"text": ...}`` if they are some, ``{"hex": ...}`` otherwise."""
    if value is None:
        return None
    text = _text(value)
    return {"hex": value.hex()} if text is None else {"text": text}


def json_text(text: str) -> str:
    """JSON that means the same, with what is not printable spelled out."""
    return text if text.isascii() and "\x7f" not in text else _BEYOND_ASCII.sub(_escaped, text)


def moment(at: datetime) -> str:
    """A time as it can be given to ``--since``: to the second, in UTC."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _spelled(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def _quoted(character: str) -> str:
    return f"\\{character}" if character in {'"', "\\"} else _spelled(character)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable():
        return character
    number = ord(character)
    if number <= _HIGHEST_BMP:
        return f"\\u{number:04x}"
    high, low = divmod(number - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
