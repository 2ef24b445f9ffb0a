"""Every format, one class each. Importing this package registers them, in the order of the documentation."""

from billfish.formats import affine, fp4, ggml, kquants

__all__ = ["affine", "fp4", "ggml", "kquants"]
