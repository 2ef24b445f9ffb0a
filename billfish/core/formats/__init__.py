"""Every format, one class each. Importing this package registers them, in the order of the documentation.

Take the registry from here: that of core/format.py is empty until this package has been imported.
"""

from billfish.core.format import FORMATS, aliases_of, get_format, parse_format, register
from billfish.core.formats import affine, fp4, fp8, ggml, kquants, nf4

__all__ = [
    "FORMATS",
    "affine",
    "aliases_of",
    "fp4",
    "fp8",
    "get_format",
    "ggml",
    "kquants",
    "nf4",
    "parse_format",
    "register",
]
