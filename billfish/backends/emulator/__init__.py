"""Metal kernels on the CPU: the source that MLX or torch hands to Metal, compiled by clang and run, thread by thread.

    from billfish.backends import emulator

    kernel = emulator.metal_kernel(name, input_names, output_names, source, header="")   # as mx.fast.metal_kernel
    with emulator.options(check=True, order="random", seed=1):
        (y,) = kernel(inputs=[x], template=[("T", np.float16)], grid=(256, 1, 1), threadgroup=(64, 1, 1),
                      output_shapes=[(256,)], output_dtypes=[np.float16])

`metal_kernel` takes MLX's arguments, and NumPy or MLX arrays; MLX arrays or types give MLX arrays back.

    library = emulator.compile_shader(text)   # as torch.mps.compile_shader
    library.kernel(x, 3, threads=256, group_size=64)

`billfish.nn.torch.emulated_mps.mps()` gives torch a device "mps" whose compile_shader is this one.

`options(check=, order="forward" | "reverse" | "random", seed=, hostile=)` say how kernels run inside a `with` block.
A checked launch raises KernelFault, with `kind`, `site` (file, line, text), `other_site`, `thread`, `threadgroup`,
`buffer`. A hostile one is built with fast mathematics and flushes subnormal numbers to zero.

`with launches() as log:` records each launch: `name`, `read` and `written` (device bytes, by buffer name),
`threadgroup_read` and `threadgroup_written` (by variable name), `threadgroup_memory` and `threadgroup_variables`
(bytes), `threadgroup_barriers`, `simdgroup_barriers`, `matrix_multiplies`, `atomics`, `loads` and `stores` (by memory
and width), `threadgroups`, `threads`, `sizes` (bytes of each buffer). `launches(instructions=True)` counts
`instructions` too: `executed` by class, and the cycles that an Apple GPU charges for them. `launches(most=4)` runs four
threadgroups and scales.

`kernel.signature(inputs, output_dtypes, template).text` is the text that MLX would compile.
"""

from billfish.backends.emulator.counting import Instructions
from billfish.backends.emulator.faults import KINDS, CompileError, KernelFault, Site
from billfish.backends.emulator.kernel import metal_kernel
from billfish.backends.emulator.run_settings import Launch, Options, launches, options
from billfish.backends.emulator.shader import compile_shader

__all__ = [
    "KINDS",
    "CompileError",
    "Instructions",
    "KernelFault",
    "Launch",
    "Options",
    "Site",
    "compile_shader",
    "launches",
    "metal_kernel",
    "options",
]
