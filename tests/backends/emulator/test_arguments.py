"""`metal_kernel` of the emulator: MLX's arguments, and what it says about bad ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from common import assert_same_bits
from emulator_support import FLOAT, HALF, each

from billfish.backends import emulator
from billfish.core.arrays import bfloat16
from billfish.core.errors import BillfishError


class TestArguments:
    def test_mlx_arrays_in_and_out(self) -> None:
        a = mx.random.normal(shape=(4, 16)).astype(mx.bfloat16)
        source = "uint elem = thread_position_in_grid.x;\nT tmp = inp[elem];\nout[elem] = metal::exp(tmp);\n"
        kernel = emulator.metal_kernel(name="myexp", input_names=["inp"], output_names=["out"], source=source)
        (b,) = kernel(
            inputs=[a],
            template=[("T", mx.bfloat16)],
            grid=(a.size, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[a.shape],
            output_dtypes=[a.dtype],
            stream=mx.gpu,
        )
        assert isinstance(b, mx.array)
        assert b.dtype == mx.bfloat16
        assert mx.allclose(b, mx.exp(a), rtol=2**-7).item()

    def test_it_can_stand_in_for_mlx(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mx.fast, "metal_kernel", emulator.metal_kernel)
        kernel = mx.fast.metal_kernel(
            name="twice",
            input_names=["x"],
            output_names=["y"],
            source="y[thread_position_in_grid.x] = 2 * x[thread_position_in_grid.x];",
        )
        (y,) = kernel(
            inputs=[mx.arange(32)],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(32,)],
            output_dtypes=[mx.int32],
        )
        assert y.tolist() == list(range(0, 64, 2))

    def test_strides(self) -> None:
        x = np.arange(48, dtype=np.float32).reshape(6, 8)[:, ::2].T
        source = """
            uint i = thread_position_in_grid.x;
            y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];
        """
        for contiguous in (True, False):
            kernel = emulator.metal_kernel("strided", ["x"], ["y"], source, ensure_row_contiguous=contiguous)
            with emulator.options(check=True):
                (y,) = kernel(
                    inputs=[x], grid=(24, 1, 1), threadgroup=(24, 1, 1), output_shapes=[x.shape], output_dtypes=[FLOAT]
                )
            assert_same_bits(y, x)

    def test_small_and_scalar_inputs(self) -> None:
        y = each(
            "y[i] = a[i] * b + c[0];",
            [np.arange(9, dtype=np.float32), np.float32(3), np.asarray([2], np.float32)],
            FLOAT,
        )
        assert_same_bits(y, np.arange(9, dtype=np.float32) * 3 + 2)

    def test_python_numbers(self) -> None:
        kernel = emulator.metal_kernel("numbers", ["n", "f", "b"], ["y"], "y[0] = n + f + b;")
        (y,) = kernel(
            inputs=[3, 0.5, True], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[FLOAT]
        )
        assert y[0] == 4.5

    def test_outputs_without_init_value_are_not_numbers(self) -> None:
        kernel = emulator.metal_kernel("nothing", [], ["y", "z"], "")
        y, z = kernel(
            inputs=[], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(4,), (4,)], output_dtypes=[FLOAT, HALF]
        )
        assert np.isnan(y).all()
        assert np.isnan(z).all()

    def test_init_value(self) -> None:
        kernel = emulator.metal_kernel("nothing", [], ["y"], "")
        (y,) = kernel(
            inputs=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(4,)],
            output_dtypes=[bfloat16],
            init_value=1.5,
        )
        assert (y == 1.5).all()

    def test_verbose(self, capsys: pytest.CaptureFixture[str]) -> None:
        kernel = emulator.metal_kernel("loud", [], ["y"], "y[0] = 1;")
        kernel(
            inputs=[], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[FLOAT], verbose=True
        )
        assert capsys.readouterr().out.startswith(
            "Generated source code for `loud`:\n```\n[[kernel]] void custom_kernel_loud_float("
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"grid": (1, 1)}, r"grid.*\(1, 1\).*three numbers"),
            ({"grid": (0, 1, 1)}, r"grid.*\(0, 1, 1\).*three numbers, each 1 or more"),
            (
                {"grid": (64, 64, 1), "threadgroup": (64, 64, 1)},
                r"threadgroup.*\(64, 64, 1\).*at most 1024 threads",
            ),
            ({"inputs": []}, r"inputs.*0.*1"),
            ({"inputs": ["x"]}, r"input x.*str.*NumPy or MLX array"),
            ({"output_shapes": [(1,), (1,)]}, r"output_shapes.*2.*1"),
            ({"output_dtypes": []}, r"output_dtypes.*0.*1"),
            ({"template": [("T", np.float64)]}, r"template.*float64.*of"),
            ({"template": [("T", 0.5)]}, r"template.*0.5.*of"),
        ],
    )
    def test_bad_arguments(self, change: dict[str, Any], message: str) -> None:
        good = {
            "inputs": [np.zeros(8, np.float32)],
            "grid": (1, 1, 1),
            "threadgroup": (1, 1, 1),
            "output_shapes": [(1,)],
            "output_dtypes": [FLOAT],
        }
        kernel = emulator.metal_kernel("small", ["x"], ["y"], "y[0] = x[0];")
        with pytest.raises(BillfishError, match=message):
            kernel(**(good | change))

    def test_bad_options(self) -> None:
        with (
            pytest.raises(BillfishError, match=r"order.*'sideways'.*forward, reverse, random"),
            emulator.options(order="sideways"),
        ):
            pass

    def test_comments_are_comments(self) -> None:
        source = """
            // At first; threadgroup memory is not there;
            /* a comment; threadgroup float gone[4];
            threadgroup words that mean nothing; */
            threadgroup float tile[8]; // "half of a string
            tile[i % 8] = 0.5; // 1.5h
            y[i] = tile[i % 8] + /* vec<float, 2>( */ 1;
        """
        assert (each(source, [np.zeros(8, np.float32)], FLOAT) == 1.5).all()

    def test_a_declaration_that_is_not_understood(self) -> None:
        kernel = emulator.metal_kernel("odd", [], ["y"], "threadgroup float tile[2] = 1;")
        call: dict[str, Any] = {"inputs": [], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
        with pytest.raises(
            emulator.CompileError, match=r"does not understand this declaration: threadgroup float tile"
        ):
            kernel(**call, output_shapes=[(1,)], output_dtypes=[FLOAT])

    def test_a_kernel_that_does_not_compile(self) -> None:
        kernel = emulator.metal_kernel("broken", ["x"], ["y"], "y[0] = x[0]\ny[1] = undeclared;")
        with pytest.raises(emulator.CompileError, match=r"broken does not compile:\nbroken:1:\d+: error: expected ';'"):
            kernel(
                inputs=[np.zeros(8, np.float32)],
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                output_shapes=[(2,)],
                output_dtypes=[FLOAT],
            )
