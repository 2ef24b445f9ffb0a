"""What tests of products share with others."""

from __future__ import annotations

import billfish as bf
from benchmarks import products
from benchmarks.machine import Limits
from benchmarks.peers import Case

FAKE = Limits(1e9, 4e9, 1e9)


def parsed(**flags):
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return products.parse(products.parser(), words)


def settings(**flags):
    found = parsed(**({"shapes": "256x96", "m": "1,17", "peers": "none"} | flags))
    found.budget, found.cold_bytes = 0.0, 1 << 16
    return found


def case_of(format, activations="q8", k=256, n=96, group_size=None):
    found = bf.get_format(format)
    return Case(found, found.check_group_size("test", group_size, k), k, n, activations)
