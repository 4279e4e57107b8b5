"""Where downloads are kept between projects: the user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path

from sideline.errors import StackError

CACHE_VARIABLE = "SIDELINE_CACHE"


def cache_directory() -> Path:
    """The directory for jars and wrappers; ``SIDELINE_CACHE`` replaces the user's own."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    try:
        import platformdirs  # noqa: PLC0415 - a part of the extra, which may be missing
    except ImportError as error:
        raise StackError(
            "the embedded stack is not installed.",
            hint="Install it with: pip install 'sideline[stack]'",
        ) from error
    return platformdirs.user_cache_path("sideline")
