"""Fixtures of all crash tests."""

from __future__ import annotations

from tests.support.ground import ground, grounds, nursery

__all__ = ["ground", "grounds", "nursery"]
