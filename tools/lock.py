"""Resolve the requirements anew, with hashes and without any address: `make lock`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import environment  # noqa: E402 - it lives beside this file, which is no package

# One resolution for every Python that is supported; nothing that says where it was found.
FLAGS = (
    "--universal",
    "--python-version=3.11",
    "--generate-hashes",
    "--no-header",
    "--no-annotate",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--quiet",
)
# dev holds everything; the smaller ones must agree with it, so it is resolved first.
LOCKS: dict[str, Sequence[str]] = {
    "dev": ("--upgrade", "--extra=stack", "--extra=dataframes", "--group=dev", "pyproject.toml"),
    "stack": ("--upgrade", "--constraints=requirements/dev.txt", "--extra=stack", "pyproject.toml"),
    "base": ("--upgrade", "--constraints=requirements/dev.txt", "pyproject.toml"),
    "uv": ("--upgrade", "requirements/uv.in"),
}


def main() -> int:
    """Write requirements/*.txt."""
    environ = environment.uv_environment(os.environ, ROOT / ".venv")
    uv = environment.find_uv(Path(sys.executable), environ)
    for name, what in LOCKS.items():
        environment.say(f"requirements/{name}.txt")
        output = f"--output-file=requirements/{name}.txt"
        code = subprocess.run(
            [*uv, "pip", "compile", *FLAGS, *what, output], env=environ, cwd=ROOT, check=False
        ).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
