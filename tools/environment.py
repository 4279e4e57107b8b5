"""Make a virtual environment that holds exactly the locked requirements, and sideline itself.

Runs on a bare Python 3.11+, before anything is installed: the standard library only.

    python tools/environment.py .venv requirements/dev.txt
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV_LOCK = ROOT / "requirements" / "uv.txt"
# Half a minute each: they come as source only.
BUILT = ("pyspark",)


def main(arguments: Sequence[str]) -> int:
    """Create or mend the environment, then install into it."""
    directory, lock = Path(arguments[0]).absolute(), Path(arguments[1]).absolute()
    python = directory / "bin" / "python"
    if not works(python):
        say(f"creating {directory.name} with Python {sys.version.split()[0]}")
        venv.create(directory, clear=True, with_pip=True)
    environ = uv_environment(os.environ, directory)
    uv = find_uv(python, environ)
    say(f"installing {lock.parent.name}/{lock.name} into {directory.name}")
    install = [*uv, "pip", "install", "--python", str(python)]
    reuse_builds(install, lock, environ)
    run([*install, "--require-hashes", "--requirement", str(lock)], environ)
    # Editable: a changed source needs no new install. The lock has its dependencies already.
    run([*install, "--quiet", "--no-deps", "--editable", str(ROOT)], environ)
    return 0


def reuse_builds(install: Sequence[str], lock: Path, environ: Mapping[str, str]) -> None:
    """Take from uv's cache what takes long to build; where it is not there, no harm is done.

    Offline, because an index that does not let its answers be kept would have it built again
    for every environment.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as part:
        part.write("".join(entry(lock.read_text("utf-8"), name) for name in BUILT))
        part.flush()
        command = [*install, "--offline", "--no-deps", "--require-hashes", "-r", part.name]
        subprocess.run(command, env=environ, capture_output=True, check=False)


def entry(lock: str, name: str) -> str:
    """A package's lines in a lock: its version, and the hashes in the lines that follow."""
    found = re.search(rf"^{re.escape(name)}==.*\n(?:[ \t].*\n)*", lock, re.MULTILINE)
    return found[0] if found else ""


def works(python: Path) -> bool:
    """Whether the environment is whole: an interrupted one lacks pip, an old one its Python."""
    if not python.exists():
        return False
    probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0


def find_uv(python: Path, environ: Mapping[str, str]) -> list[str]:
    """How to call uv: the one on the PATH, or one of the environment's own."""
    found = shutil.which("uv", path=environ.get("PATH"))
    if found and runs([found, "--version"]):
        return [found]
    own = [str(python), "-m", "uv"]
    if not runs([*own, "--version"]):
        say("uv is not on the PATH: installing it into the environment")
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        run([*pip, "--require-hashes", "--requirement", str(UV_LOCK)], environ)
    return own


def uv_environment(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment for uv: a cache that can be written, and the index that pip would ask."""
    found = dict(environ)
    if "UV_CACHE_DIR" not in found and not writable(default_cache(found)):
        found["UV_CACHE_DIR"] = str(directory / ".uv-cache")
    if "PIP_INDEX_URL" in found:
        # A company's mirror is configured for pip, as a rule; uv has a name of its own for it.
        found.setdefault("UV_DEFAULT_INDEX", found["PIP_INDEX_URL"])
    # A company's own certificate authority is known to the system, not to uv. By both its names.
    for name in ("UV_SYSTEM_CERTS", "UV_NATIVE_TLS"):
        found.setdefault(name, "true")
    # An activated environment of somebody else is none of our business.
    found.pop("VIRTUAL_ENV", None)
    return found


def default_cache(environ: Mapping[str, str]) -> Path | None:
    """Where uv would keep its cache; None where nothing says."""
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"], "uv")
    return Path(environ["HOME"], ".cache", "uv") if environ.get("HOME") else None


def writable(directory: Path | None) -> bool:
    """Whether the directory is there, or can be made, and can be written."""
    if directory is None:
        return False
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def runs(command: Sequence[str]) -> bool:
    """Whether the command ends well; a shim of a version that is not active does not."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run the command with its output visible; end with its exit code if it fails."""
    code = subprocess.run(command, env=environ, check=False).returncode
    if code:
        sys.exit(code)


def say(text: str) -> None:
    """A line for whoever waits."""
    print(f"{Path(__file__).stem}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
