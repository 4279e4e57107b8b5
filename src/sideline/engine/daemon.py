"""The process that Spark forks its Python workers from, with what they need loaded already.

A worker of its own imports costs most of a second; the next round's tasks should be waiting
for the hand-over by then.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

import sideline.engine.task  # noqa: F401 - loaded here, so that every fork has it

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    manager()
