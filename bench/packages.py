"""Packages that only a contestant needs, in a directory of their own.

sideline's environment stays as its users have it: pandas on the path would slow its workers down.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from sideline.stack.cache import cache_directory

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def directory() -> Path:
    """Where the packages of requirements.txt are, or will be, for this Python."""
    wanted = f"{sys.version_info[:2]} {REQUIREMENTS.read_text()}"
    return cache_directory() / f"bench-packages-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"


def fetch(progress: Callable[[str, str], None]) -> Path:
    """Install them the first time; a directory that is there is complete."""
    home = directory()
    if not home.is_dir():
        progress("packages", "installing pandas and pyarrow for a contestant")
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix="bench-new-") as work:
            target = Path(work, "packages")
            _install(target)
            target.rename(home)
    return home


def _install(target: Path) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    installer = [uv, "pip", "install", "--quiet", "--python", sys.executable] if uv else None
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*(installer or pip), "--target", str(target), "-r", str(REQUIREMENTS)]
    subprocess.run(command, check=True)
