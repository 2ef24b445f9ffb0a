"""The text for Metal, compared with MLX's own: when it exports a function, it prints what it would compile."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from billfish.backends import emulator
from billfish.backends.metal.signature import ATTRIBUTES, TYPES
from billfish.core.errors import BillfishError


@contextlib.contextmanager
def standard_output(to: Any) -> Iterator[None]:
    """MLX prints from C++, past Python's sys.stdout."""
    saved = os.dup(1)
    os.dup2(to.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def mlx_text(tmp_path: Path, arguments: dict[str, Any], call: dict[str, Any], inputs: list[mx.array]) -> str:
    kernel = mx.fast.metal_kernel(**arguments)

    def function(*arrays: mx.array) -> Any:
        return kernel(inputs=list(arrays), verbose=True, stream=mx.gpu, **call)

    with tempfile.TemporaryFile() as printed:
        with standard_output(printed):
            mx.export_function(str(tmp_path / "exported.mlxfn"), function, *inputs)
        printed.seek(0)
        text = printed.read().decode()
    return text.split("```\n", 1)[1].rsplit("\n```", 1)[0]


def check(
    tmp_path: Path,
    arguments: dict[str, Any],
    inputs: list[mx.array],
    output_dtypes: list[Any],
    template: list[tuple[str, Any]] | None = None,
) -> None:
    call = {
        "output_shapes": [(64,)] * len(output_dtypes),
        "output_dtypes": output_dtypes,
        "grid": (64, 1, 1),
        "threadgroup": (32, 1, 1),
    }
    if template:
        call["template"] = template
    expected = mlx_text(tmp_path, arguments, call, inputs)
    assert emulator.metal_kernel(**arguments).signature(inputs, output_dtypes, template).text == expected


def kernel(source: str, inputs: list[str], outputs: list[str], **others: Any) -> dict[str, Any]:
    return {"name": "k", "input_names": inputs, "output_names": outputs, "source": source, **others}


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64])
def test_small_inputs_are_constant(tmp_path: Path, size: int) -> None:
    check(tmp_path, kernel("y[0] = x[0];", ["x"], ["y"]), [mx.zeros((size,))], [mx.float32])


def test_scalar_inputs_are_references(tmp_path: Path) -> None:
    check(tmp_path, kernel("y[0] = x * x_shape;", ["x"], ["y"]), [mx.array(3.0)], [mx.float32])


@pytest.mark.parametrize("name", sorted(TYPES))
def test_types(tmp_path: Path, name: str) -> None:
    dtype = getattr(mx, "bool_" if name == "bool" else name)
    arguments = kernel("y[thread_position_in_grid.x] = T(x[0]);", ["x"], ["y"])
    check(tmp_path, arguments, [mx.zeros((2, 8), dtype)], [dtype], [("T", dtype)])


@pytest.mark.parametrize("attribute", sorted(ATTRIBUTES))
def test_attributes(tmp_path: Path, attribute: str) -> None:
    source = f"auto a = {attribute}; y[0] = x[0];"
    check(tmp_path, kernel(source, ["x"], ["y"]), [mx.zeros((16,))], [mx.float32])


def test_attributes_are_found_inside_words_and_comments(tmp_path: Path) -> None:
    source = "int my_thread_index_in_simdgroup_too = 0; // threads_per_grid\ny[0] = x[0];"
    check(tmp_path, kernel(source, ["x"], ["y"]), [mx.zeros((16,))], [mx.float32])


def test_shapes_are_found_inside_words(tmp_path: Path) -> None:
    # "x_shape" is inside "max_shape", "w_strides" inside "raw_strides": MLX adds the arguments.
    source = "int max_shape = 1; int raw_strides = w_ndim; y[thread_position_in_grid.x] = x[0] + w[0];"
    check(tmp_path, kernel(source, ["x", "w"], ["y"]), [mx.zeros((4, 4)), mx.zeros((2, 3))], [mx.float32])


def test_header_is_not_searched(tmp_path: Path) -> None:
    header = "// x_shape thread_position_in_grid\n"
    check(tmp_path, kernel("y[0] = x[0];", ["x"], ["y"], header=header), [mx.zeros((16,))], [mx.float32])


@pytest.mark.parametrize("header", ["", "// open line", "\n\n", "constant int a = 1;\n"])
def test_headers(tmp_path: Path, header: str) -> None:
    check(tmp_path, kernel("y[0] = x[0];", ["x"], ["y"], header=header), [mx.zeros((16,))], [mx.float32])


def test_templates(tmp_path: Path) -> None:
    template = [("T", mx.bfloat16), ("n", -3), ("yes", True), ("no", False), ("U", mx.uint32)]
    source = "y[thread_position_in_grid.x] = T(n); z[0] = U(yes);"
    outputs = [mx.bfloat16, mx.uint32]
    check(tmp_path, kernel(source, ["x"], ["y", "z"]), [mx.zeros((16,))], outputs, template)


def test_atomic_outputs(tmp_path: Path) -> None:
    source = "atomic_fetch_add_explicit(y, x[thread_position_in_grid.x], memory_order_relaxed);"
    check(tmp_path, kernel(source, ["x"], ["y"], atomic_outputs=True), [mx.zeros((64,))], [mx.float32])


def test_no_inputs(tmp_path: Path) -> None:
    check(tmp_path, kernel("y[thread_position_in_grid.x] = 1;", [], ["y"]), [], [mx.float32])


def test_two_outputs_shapes_and_no_attribute_are_broken_in_mlx_too(tmp_path: Path) -> None:
    arguments = kernel("y[0] = x[x_shape[0] - 1]; z[0] = 0;", ["x"], ["y", "z"])
    check(tmp_path, arguments, [mx.zeros((16,))], [mx.float32, mx.float32])
    with pytest.raises(emulator.CompileError, match="k does not compile"):
        emulator.metal_kernel(**arguments)(
            inputs=[np.zeros(16, np.float32)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,), (1,)],
            output_dtypes=[np.float32, np.float32],
        )


def test_unknown_type() -> None:
    with pytest.raises(BillfishError, match=r"metal_kernel.*output_dtypes.*float64.*bool, uint8"):
        emulator.metal_kernel("k", ["x"], ["y"], "").signature([np.zeros(9, np.float32)], [np.float64])
