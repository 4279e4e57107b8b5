"""Passwords taken out of text that people will see."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

MASK = "***"

# What libpq takes as a secret, in a URL's query or in "key=value" form.
_SECRETS = frozenset(
    {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
)
_SECRET_WORD = "|".join(sorted(_SECRETS))
# libpq allows blanks around "=" and quotes with backslashes; an open quote reaches to the end.
_KEY_VALUE = re.compile(
    rf"\b({_SECRET_WORD})(\s*=\s*)('(?:[^'\\]|\\.)*'?|(?:\\.|[^\s\\])+)",
    re.IGNORECASE | re.DOTALL,
)
_URL_IN_TEXT = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")


def mask_database(url: str) -> str:
    """A libpq URL or "key=value" string without its passwords."""
    return _mask_url(url) if "://" in url else _mask_key_values(url)


def mask_text(text: str) -> str:
    """Text from elsewhere (an exception, a traceback) without passwords in URLs or pairs."""
    return _mask_key_values(_URL_IN_TEXT.sub(lambda found: _mask_url(found[0]), text))


def mask_webhook(url: str) -> str:
    """A webhook's address without what only its owner should know: often that is the path."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return MASK
    host = parts.netloc.rpartition("@")[2]
    hidden = "@" in parts.netloc or parts.path.strip("/") or parts.query or parts.fragment
    return f"{parts.scheme}://{host}" + (f"/{MASK}" if hidden else "")


def mask_command(words: Sequence[str]) -> str:
    """A command without its arguments: there may be a token among them."""
    return f"{words[0]} {MASK}" if len(words) > 1 else words[0]


def _mask_key_values(text: str) -> str:
    # Most texts name no secret, and the search for one costs a hundred times this look.
    folded = text.casefold()
    if not any(name in folded for name in _SECRETS):
        return text
    return _KEY_VALUE.sub(rf"\1\2{MASK}", text)


def _mask_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{_mask_query(_mask_userinfo(rest))}"


def _mask_userinfo(rest: str) -> str:
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    # A password that should have been percent-encoded may hold "/", "?" or "@": better to hide
    # the host as well than to show half a password.
    if "@" not in authority and ":" in authority and "@" in rest:
        authority = rest[: rest.rindex("@") + 1]
    userinfo, at, hosts = authority.rpartition("@")
    user, colon, _password = userinfo.partition(":")
    if not (at and colon):
        return rest
    return f"{user}:{MASK}@{hosts}{rest[len(authority) :]}"


def _mask_query(rest: str) -> str:
    path, question, query = rest.partition("?")
    pairs = [_mask_pair(pair) for pair in query.split("&")]
    return path + question + "&".join(pairs)


def _mask_pair(pair: str) -> str:
    name, equals, _value = pair.partition("=")
    # libpq decodes the names too: "pass%77ord" is a password.
    return f"{name}={MASK}" if equals and unquote(name).lower() in _SECRETS else pair
