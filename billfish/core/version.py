"""The version, in a module of its own so that no module of billfish imports the whole. pyproject.toml repeats it."""

__version__ = "0.1.0"
