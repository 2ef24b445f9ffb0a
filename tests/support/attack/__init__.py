"""Hostile files and arguments, made by the grammar of what they imitate. `make attack` runs them all: see run.py."""
