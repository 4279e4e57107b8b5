"""Contestants that run only when they are asked for: what they need has to be fetched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import jars, packages
from bench.peers import Peer, Task
from sideline.stack.java import find_java

PROGRAM = Path(__file__).parent / "peers" / "CopyTopic.java"
# With these Kafka Streams was at its best. The optimising compiler cost a quarter more CPU: a
# million records are copied before it pays.
_JAVA = ("-Xmx1g", "-XX:+UseParallelGC", "-XX:TieredStopAtLevel=1")
_LOG = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def _quix(_task: Task) -> list[str]:
    return [str(packages.environment() / "bin" / "python"), "-m", "bench.peers.quix"]


def _streams(_task: Task) -> list[str]:
    java = compiler()
    assert java is not None  # otherwise it would not be ready
    path = os.pathsep.join(map(str, jars.streams(lambda *_: None)))
    return [str(java), *_JAVA, _LOG, "-cp", path, str(PROGRAM)]


OPTIONAL = {
    "quix": Peer("quixstreams", "quixstreams, two processes", _quix, commits="offsets"),
    "streams": Peer("Kafka Streams", "Kafka Streams, two threads", _streams, commits="offsets"),
}


def ready(
    asked: Iterable[str], say: Callable[[str], None], progress: Callable[[str, str], None]
) -> list[Peer]:
    """Those that were asked for and can run here, with all that they need."""
    found = []
    for name in asked:
        if name == "quix":
            packages.fetch_environment(progress)
        elif compiler() is None:
            say("Kafka Streams is left out: its program needs a JDK (javac), and there is none.")
            continue
        else:
            jars.streams(progress)
        found.append(OPTIONAL[name])
    return found


def compiler() -> Path | None:
    """The ``java`` of a JDK, which runs a source file: everybody's, or the one of PATH's javac."""
    javac = shutil.which("javac")
    homes = [find_java().home, *([Path(javac).resolve().parent.parent] if javac else [])]
    whole = [home for home in homes if all((home / "bin" / n).exists() for n in ("java", "javac"))]
    return whole[0] / "bin" / "java" if whole else None
