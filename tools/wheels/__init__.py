"""Wheels for every platform from one machine: `make wheels`."""
