"""The CPU engine: C++ kernels for every format, compiled for several ISA levels, chosen when the module loads.

To pack W (docs/words.md has the words):
    structure.py  whether the kernels read a format's storage as it is
    source.py     where codes and scales lie in the storage
    axes.py       which codes and which scales of the kernels a format is made of
    packed.py     the result: one stream of bytes, in the order in which the kernels read
    experts.py    the same of a stack of matrices
    unpack.py     the way back
    tensors.py    the result as tensors of torch
To multiply: x and the stream go to the native core, and y comes back. torch_threads.py says on whose threads.
"""
