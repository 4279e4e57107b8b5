"""Certificates for one test run, made by openssl: an authority, and what it signed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_CONFIG = """
[ca]
default_ca = here
[here]
database = {folder}/index.txt
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = anything
copy_extensions = copy
unique_subject = no
[anything]
commonName = supplied
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its key, each in a PEM file."""

    certificate: Path
    key: Path

    def together(self) -> str:
        """Key and certificate, as Kafka's brokers want them in one PEM file."""
        return self.key.read_text() + self.certificate.read_text()


class Authority:
    """A certificate authority that only this test run trusts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate = folder / "ca.crt"
        (folder / "index.txt").touch()
        (folder / "ca.conf").write_text(_CONFIG.format(folder=folder))
        self._openssl(
            *("req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "2"),
            *("-subj", "/CN=sideline test authority", "-keyout", "ca.key", "-out", "ca.crt"),
            *("-addext", "basicConstraints=critical,CA:TRUE"),
        )

    def sign(self, name: str, alternative: str = "IP:127.0.0.1", *, expired: bool = False) -> Pair:
        """A certificate for that name; one that is expired was good for a day in 2020."""
        self._openssl(
            *("req", "-new", "-nodes", "-newkey", "rsa:2048", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName={alternative}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        dates = (
            ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
            if expired
            else ("-days", "2")
        )
        self._openssl(
            *("ca", "-batch", "-notext", "-config", "ca.conf", "-cert", "ca.crt"),
            *("-keyfile", "ca.key", "-in", f"{name}.csr", "-out", f"{name}.crt", *dates),
        )
        return Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")

    def encrypted(self, pair: Pair, password: str) -> Path:
        """The pair's key once more, under a password."""
        out = pair.key.with_suffix(".locked")
        self._openssl(
            *("pkcs8", "-topk8", "-in", str(pair.key), "-out", str(out)),
            *("-passout", f"pass:{password}"),
        )
        return out

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(
            ["openssl", *arguments], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
