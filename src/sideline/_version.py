"""The version, read by the build and by `sideline --version`."""

__version__ = "0.1.0.dev0"
