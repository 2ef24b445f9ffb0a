"""Checkpoints: the files that people have, opened lazily and without a bit of their weights changed.

    ck = bf.open_checkpoint("model.gguf")   # or a .safetensors file, or a folder of shards with its config.json
    ck["model.layers.0.mlp.up_proj.weight"]      # QuantizedTensor [N, K], or a NumPy array where nothing is quantized

A :class:`Checkpoint` is a mapping from names to tensors. Opening one reads headers only; a tensor is read, mostly as
views of the memory-mapped file, when it is asked for. Names are the file's own, except that a quantized matrix that a
layout spreads over several arrays (`M.qweight`, `M.weight_packed`, `M.scales`, ...) is one entry, `M.weight`.

    ck.config                 config.json (with hf_quant_config.json merged in), or {}
    ck.metadata               what the container says beside its tensors: GGUF's fields, safetensors' __metadata__
    ck.layouts                which were recognised, such as {"gptq", "plain"}
    ck.describe(name)         a Description: format (None for plain arrays), dtype, shape, group_size, nbytes,
                              bits_per_weight, act_order, unsupported (why it cannot be read, or ""); headers only
    ck.read(name, rows=(a, b), columns=(c, d))      W[a:b, c:d], and only its bytes are read. Cuts along K fall on
                              whole groups (and whole blocks of the storage), or at the end
    ck.permutation(name)      None, or for act-order an int64 array p [K]: see below

A stack of matrices (experts) is one QuantizedExperts [E, N, K], or a plain array of that shape; `ck.read(name,
experts=(e, f), ...)` is some of its matrices, and rows and columns are the same of each.

**Act-order** (GPTQ's desc_act, compressed-tensors' actorder="group"): columns of W are sorted by group when they are
read, so that groups are consecutive as everywhere else, and p says where they came from: sorted[:, j] is W[:, p[j]].
A tensor has its p as `ck[name].permutation`: `bf.dequantize` gives W in its own order, and products take x as it is. A
part [c, d) of the sorted columns has none and takes x[..., p[c:d]].

**Scales** that are bfloat16 or float32 in the file become float16 where that loses nothing, since every kernel takes
float16; otherwise they are kept as float32 (`u4`, `u4b8`, `u8`, `u8b128`), or as they are (`affine4`, `affine8`).
"""

from billfish.checkpoints.checkpoint import Checkpoint, open_checkpoint
from billfish.checkpoints.checkpoint import load as load  # the older name
from billfish.checkpoints.entry import Description

__all__ = ["Checkpoint", "Description", "open_checkpoint"]
