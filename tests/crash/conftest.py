"""Fixtures of all crash tests."""

from __future__ import annotations

from tests.support.chain import chains
from tests.support.ground import ground, grounds, nursery
from tests.support.outputs import chained, outputs

__all__ = ["chained", "chains", "ground", "grounds", "nursery", "outputs"]
