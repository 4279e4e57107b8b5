"""Measures sideline against what people write today: ratios inside one run, never bare numbers."""
