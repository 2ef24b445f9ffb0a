"""The CPU engine: C++ kernels for every format, compiled for several ISA levels, chosen when the module loads.

To pack W (docs/cpu.md draws the stream):
    source.py     where codes and scales lie in the storage
    axes.py       which codes and which scales of the kernels a format is made of
    packed.py     the result: one stream of bytes, in the order in which the kernels read
    experts.py    the same of a stack of matrices
    unpack.py     the packed stream back to storage
    tensors.py    the packed stream as torch tensors
To multiply: backend.py passes x and the stream to the native core (_cpu). torch_threads.py chooses the thread pool.
"""
