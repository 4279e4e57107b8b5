"""Packages that only a contestant needs, in a directory or an environment of their own.

sideline's environment stays as its users have it: pandas on the path would slow its workers down,
and quixstreams wants another confluent-kafka.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

from sideline.stack.cache import cache_directory

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
QUIX = Path(__file__).with_name("requirements-quix.txt")


def directory() -> Path:
    """Where the packages of requirements.txt are, or will be, for this Python."""
    return _home("packages", REQUIREMENTS)


def environment() -> Path:
    """Where the environment of requirements-quix.txt is, or will be, for this Python."""
    return _home("quix", QUIX)


def fetch(progress: Callable[[str, str], None]) -> Path:
    """Install the packages the first time; a directory that is there is complete."""
    text = "installing pandas and pyarrow for a contestant"
    return _made(directory(), lambda target: _install(REQUIREMENTS, target), progress, text)


def fetch_environment(progress: Callable[[str, str], None]) -> Path:
    """Make the environment the first time; one that is there is complete."""
    return _made(environment(), _make, progress, "installing quixstreams for a contestant")


def _home(name: str, requirements: Path) -> Path:
    wanted = f"{sys.version_info[:2]} {requirements.read_text()}"
    return cache_directory() / f"bench-{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"


def _made(
    home: Path,
    make: Callable[[Path], None],
    progress: Callable[[str, str], None],
    text: str,
) -> Path:
    if not home.is_dir():
        progress("packages", text)
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix="bench-new-") as work:
            target = Path(work, "made")
            make(target)
            target.rename(home)
    return home


def _install(requirements: Path, target: Path) -> None:
    _run(sys.executable, "--target", str(target), "-r", str(requirements))


def _make(target: Path) -> None:
    # Its Python finds what is beside it, also after the move; the programs in bin would not.
    venv.create(target, symlinks=True, with_pip=_uv() is None)
    _run(str(target / "bin" / "python"), "-r", str(QUIX))


def _run(python: str, *arguments: str) -> None:
    uv = _uv()
    installer = [uv, "pip", "install", "--quiet", "--python", python] if uv else None
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*(installer or pip), *arguments], check=True)


def _uv() -> str | None:
    return shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
