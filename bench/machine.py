"""Where the figures come from: machine, versions, load."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import confluent_kafka
import psutil
import psycopg

from bench.services import Services
from sideline.stack.java import find_java

PACKAGES = ("sideline", "pyspark", "confluent-kafka", "psycopg", "orjson")
SETTINGS = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "wal_level")


def describe(services: Services) -> dict[str, Any]:
    """Everything a reader needs to judge the figures; nothing that names the machine."""
    return {
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "java": _java(),
        "librdkafka": confluent_kafka.libversion()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "postgresql": _postgres(services),
        "load_average": load(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _java() -> str:
    shown = subprocess.run(
        [str(find_java().executable), "-version"], capture_output=True, text=True, check=True
    )
    return shown.stderr.splitlines()[0]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _postgres(services: Services) -> dict[str, str]:
    with psycopg.connect(services.database) as connection:
        names = ("server_version", *SETTINGS)
        rows = [connection.execute("select current_setting(%s)", (n,)).fetchone() for n in names]
    return {name: row[0] for name, row in zip(names, rows, strict=True) if row}


def load() -> list[float]:
    """The machine's load averages of 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]
