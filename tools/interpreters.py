"""Find Pythons that really run: a pyenv shim may stand for a version that is not active.

python tools/interpreters.py           the supported versions besides this one, a line each
python tools/interpreters.py 3.12      the path of that version's interpreter
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SUPPORTED = ("3.11", "3.12", "3.13")
PROBE = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"


def main(arguments: Sequence[str]) -> int:
    """Print what was asked for."""
    if not arguments:
        this = "{}.{}".format(*sys.version_info)
        present = [version for version in SUPPORTED if version != this and find(version)]
        print("\n".join(present))
        return 0
    found = find(arguments[0])
    if found is None:
        print(f"no Python {arguments[0]} runs on this machine.", file=sys.stderr)
        return 1
    print(found)
    return 0


def find(version: str) -> Path | None:
    """The first interpreter of that version that runs and can make environments."""
    return next((python for python in candidates(version) if is_version(python, version)), None)


def candidates(version: str) -> Iterator[Path]:
    """On the PATH, then among pyenv's installed versions."""
    for directory in os.get_exec_path():
        path = Path(directory, f"python{version}")
        if path.is_file():
            yield path
    root = os.environ.get("PYENV_ROOT")
    roots = [Path(root)] if root else [path.parent for path in map(Path, os.get_exec_path())]
    for place in roots:
        yield from sorted(place.glob(f"versions/{version}.*/bin/python{version}"))


def is_version(python: Path, version: str) -> bool:
    """Whether it runs, is what its name says, and brings venv and pip along."""
    try:
        done = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
