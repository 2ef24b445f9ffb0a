"""onnxruntime's MatMulNBits: integer weights of 4 or 8 bits, with int8 or with FP32 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.base import Case, Floats, Peer, Prepared, copies_for, load_package

# MatMulNBits: w = (q - zero) * scale, with zero 8 or 128 unless it is given.
INTEGERS = ("u4", "u4b8", "q4_0", "u8b128", "q8_0", "q8_1")
GROUPS = (16, 32, 64, 128, 256)
FLOAT32_ARITHMETIC, INT8_ARITHMETIC = 1, 4  # its accuracy_level


class OnnxRuntime(Peer):
    name = family = "onnxruntime"
    install = "onnxruntime onnx"

    def load(self) -> None:
        self.runtime = load_package("onnxruntime", self.install)
        self.onnx = load_package("onnx", self.install)

    def version(self) -> str:
        return str(self.runtime.__version__)

    def computes(self, case: Case) -> Case:
        """The case itself; or, for 4-bit formats that it lacks, 4-bit integers in float arithmetic, where the format
        hardly matters. With int8 arithmetic it does, and there is no such stand-in. The stand-in's groups are u4b8's,
        32 to 128."""
        if case.format.name in INTEGERS or case.format.element.bits != 4 or case.activations == "q8":
            return case
        return case.restated("u4b8", min(max(32, case.group_size), 128))

    def label(self, case: Case) -> str:
        computes = self.computes(case)
        return self.name if computes is case else f"{self.name}:{computes.label}"

    def can_run(self, case: Case) -> tuple[bool, str]:
        case = self.computes(case)
        if case.format.name not in INTEGERS:
            return False, f"MatMulNBits has no {case.format.name}"
        if case.group_size not in GROUPS or case.k % case.group_size:
            return False, f"MatMulNBits takes groups of {', '.join(map(str, GROUPS))} that divide K"
        return True, ""

    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        case = self.computes(case)
        inputs = _inputs(case)
        nbytes = sum(array.nbytes // len(array) * case.n for array in inputs.values())
        copies = copies_for(nbytes, cold_bytes)
        helper, numpy_helper = self.onnx.helper, self.onnx.numpy_helper
        nodes, initializers, outputs = [], [], []
        for i in range(copies):
            names = [f"{name}{i}" for name in inputs]
            # Every copy begins with another row: onnxruntime keeps equal initializers only once.
            for name, array in zip(names, inputs.values(), strict=True):
                copy = case.repeated(array, start=i)
                initializers.append(numpy_helper.from_array(copy if name.startswith("B") else copy.reshape(-1), name))
            level = INT8_ARITHMETIC if case.activations == "q8" else FLOAT32_ARITHMETIC
            attributes = {"K": case.k, "N": case.n, "bits": case.format.element.bits, "block_size": case.group_size}
            nodes.append(
                helper.make_node(
                    "MatMulNBits",
                    ["A", *names],
                    [f"Y{i}"],
                    domain="com.microsoft",
                    accuracy_level=level,
                    **attributes,
                )
            )
            outputs.append(helper.make_tensor_value_info(f"Y{i}", self.onnx.TensorProto.FLOAT, ["M", case.n]))
        x = helper.make_tensor_value_info("A", self.onnx.TensorProto.FLOAT, ["M", case.k])
        graph = helper.make_graph(nodes, "products", [x], outputs, initializers)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        # Its threads spin for a while after a call and would take the next one's cores. Told not to
        # (session.intra_op.allow_spinning=0) they also sleep between the products of one pass, which costs it time
        # that its users do not lose. So it keeps its defaults, and the bench waits for it to calm down (`settle`).
        providers = ["CPUExecutionProvider"]
        session = self.runtime.InferenceSession(model.SerializeToString(), options, providers=providers)
        return Session(self.runtime, session, copies, case.n)


def _inputs(case: Case) -> dict[str, Any]:
    """Of the distinct rows: B uint8 [R, groups, bytes of a group], low nibble first; scales, zero points [R, ...]."""
    codes, bits, groups = case.planes["codes"], case.format.element.bits, case.k // case.group_size
    if case.format.element.name == "s8":
        codes = codes ^ np.uint8(0x80)
    packed = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    inputs = {"B": packed.reshape(len(codes), groups, -1), "scales": case.planes["scale"].astype(np.float32)}
    if "zero" in case.planes:
        zeros = np.pad(case.planes["zero"], ((0, 0), (0, groups % 2)))
        inputs["zeros"] = zeros[:, 0::2] | zeros[:, 1::2] << 4
    return inputs


class Session(Prepared):
    """One graph with a product for each copy: a pass pays for one call of `run` only."""

    def __init__(self, runtime: Any, session: Any, copies: int, n: int) -> None:
        self.copies, self._n = copies, n
        self._runtime, self._session = runtime, session
        self._outputs: list[Any] = []

    def bind(self, x: Floats) -> Callable[[], object]:
        new_value = self._runtime.OrtValue.ortvalue_from_numpy
        binding, session = self._session.io_binding(), self._session
        binding.bind_ortvalue_input("A", new_value(x))
        self._outputs = [new_value(np.empty((len(x), self._n), np.float32)) for _ in range(self.copies)]
        for i, output in enumerate(self._outputs):
            binding.bind_ortvalue_output(f"Y{i}", output)
        return lambda: session.run_with_iobinding(binding)

    def result(self) -> Floats:
        return np.asarray(self._outputs[0].numpy(), np.float32)
