"""Every format, one class each. Importing this package registers them, in the order of the documentation."""

from billfish.core.formats import affine, fp4, fp8, ggml, kquants, nf4

__all__ = ["affine", "fp4", "fp8", "ggml", "kquants", "nf4"]
