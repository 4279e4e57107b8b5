"""The jars of the Structured Streaming contestants, fetched once by the Ivy inside pyspark."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

import platformdirs
import pyspark

IVY_XML = Path(__file__).with_name("ivy.xml")


def fetch() -> list[Path]:
    """The jars that ivy.xml names, from the user's cache or, the first time, through Ivy."""
    digest = hashlib.sha256(IVY_XML.read_bytes()).hexdigest()[:12]
    cache = platformdirs.user_cache_path("sideline") / f"bench-{digest}"
    if not cache.is_dir():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as work:
            jars = Path(work, "jars")
            _retrieve(jars, Path(work, "ivy"))
            _move(jars, cache)
    return sorted(cache.glob("*.jar"))


def _retrieve(jars: Path, ivy_cache: Path) -> None:
    ivy = next(Path(pyspark.__path__[0], "jars").glob("ivy-*.jar"))
    # fmt: off
    command = [
        "java", "-jar", str(ivy), "-ivy", str(IVY_XML), "-cache", str(ivy_cache),
        "-types", "jar", "bundle", "-retrieve", f"{jars}/[artifact]-[revision].[ext]",
    ]
    # fmt: on
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    wanted = len(ET.parse(IVY_XML).getroot().findall(".//dependency"))
    found = len(list(jars.glob("*.jar")))
    if found != wanted:
        message = f"Ivy brought {found} jars, {wanted} were asked for"
        raise RuntimeError(message)


def _move(jars: Path, cache: Path) -> None:
    try:
        jars.rename(cache)
    except OSError:
        # Another run was quicker; its jars are the same.
        shutil.rmtree(jars)
