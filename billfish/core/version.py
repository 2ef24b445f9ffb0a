"""The version, in a module of its own so that no module of billfish imports the whole. Packages read it from here."""

__version__ = "0.1.0"
