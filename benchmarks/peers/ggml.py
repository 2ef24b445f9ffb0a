"""ggml, through ctypes on the shared libraries that llama-cpp-python installs; as they are, and repacked.

Its weights are our GGUF blocks, byte for byte. x is always quantized to int8. The second peer holds the weights in
ggml's CPU_REPACK buffer, which interleaves rows for the machine's kernels; llama.cpp does so wherever it can.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.base import Case, Floats, Peer, Prepared, copies_for
from billfish.checkpoints.gguf_header import NUMBERS
from billfish.core.errors import BackendUnavailable
from billfish.core.format import get_format
from billfish.core.tensor import QuantizedTensor

F32, I32 = NUMBERS["F32"], NUMBERS["I32"]
NAMES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl")
NAMES += ("mxfp4_gguf", "nvfp4_gguf")
TYPES = {name: NUMBERS[name.removesuffix("_gguf").upper()] for name in NAMES}
# Formats of other containers that a ggml type holds with the same codes and scales, by their group size.
SAME = {
    ("u4b8", 32): "q4_0",
    ("u8b128", 32): "q8_0",
    ("q8_1", 32): "q8_0",
    ("mxfp4", 32): "mxfp4_gguf",
    ("nvfp4", 16): "nvfp4_gguf",
}
# Formats that ggml lacks, and the nearest that it has; those weights are quantized anew.
STAND_INS = {("fp4", 32): "mxfp4_gguf", ("fp4", 16): "nvfp4_gguf", ("u4", 32): "q4_1"}

FOLDER_VARIABLE = "BILLFISH_GGML_LIB"


class InitParameters(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Library:
    """The functions of ggml that we call."""

    def __init__(self, folder: Path) -> None:
        pointer, size, integer, long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
        loaded = [open_library(folder, name) for name in ("ggml-base", "ggml-cpu")]

        def function(name: str, result: Any, *arguments: Any) -> Any:
            for library in loaded:
                if hasattr(library, name):
                    found = getattr(library, name)
                    found.restype, found.argtypes = result, arguments
                    return found
            raise BackendUnavailable(f"ggml has no {name} in {folder}. A newer version has it.")

        # It tells standard error of every tensor that it repacks.
        self._silent = ctypes.CFUNCTYPE(None, integer, ctypes.c_char_p, pointer)(lambda level, text, data: None)
        function("ggml_log_set", None, pointer, pointer)(ctypes.cast(self._silent, pointer), None)
        self.version = function("ggml_version", ctypes.c_char_p)
        self.init = function("ggml_init", pointer, InitParameters)
        self.free = function("ggml_free", None, pointer)
        self.tensor_overhead = function("ggml_tensor_overhead", size)
        self.graph_overhead = function("ggml_graph_overhead_custom", size, size, ctypes.c_bool)
        self._new_matrix = function("ggml_new_tensor_2d", pointer, pointer, integer, long, long)
        self._new_stack = function("ggml_new_tensor_3d", pointer, pointer, integer, long, long, long)
        self.multiply = function("ggml_mul_mat", pointer, pointer, pointer, pointer)
        self.multiply_chosen = function("ggml_mul_mat_id", pointer, pointer, pointer, pointer, pointer)
        self.new_graph = function("ggml_new_graph_custom", pointer, pointer, size, ctypes.c_bool)
        self.add_to_graph = function("ggml_build_forward_expand", None, pointer, pointer)
        self.allocate = function("ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)
        self.free_buffer = function("ggml_backend_buffer_free", None, pointer)
        self.write = function("ggml_backend_tensor_set", None, pointer, pointer, size, size)
        self.read = function("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        self.compute = function("ggml_backend_graph_compute", integer, pointer, pointer)
        self.supports = function("ggml_backend_dev_supports_op", ctypes.c_bool, pointer, pointer)
        self.set_threads = function("ggml_backend_cpu_set_n_threads", None, pointer, integer)
        self.buffer_name = function("ggml_backend_buft_name", ctypes.c_char_p, pointer)
        self.backend = function("ggml_backend_cpu_init", pointer)()
        self.plain = function("ggml_backend_cpu_buffer_type", pointer)()
        registry = function("ggml_backend_cpu_reg", pointer)()
        self.device = function("ggml_backend_reg_dev_get", pointer, pointer, size)(registry, 0)
        find = function("ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)
        self.repack = self._extra_buffer(find(registry, b"ggml_backend_dev_get_extra_bufts"), b"CPU_REPACK")

    def _extra_buffer(self, address: int | None, name: bytes) -> int | None:
        """The buffer type of that name, from the list, ended by null, that the function at `address` returns."""
        if not address:
            return None
        types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(self.device)
        index = 0
        while types and types[index]:
            if self.buffer_name(types[index]) == name:
                return int(types[index])
            index += 1
        return None

    def context(self, tensors: int, graph_nodes: int = 0) -> int:
        """Room for the descriptions of tensors and a graph; their data go elsewhere."""
        graph = self.graph_overhead(graph_nodes, False) if graph_nodes else 0
        return int(self.init(InitParameters(tensors * self.tensor_overhead() + graph, None, True)))

    def new(self, context: int, type: int, *shape: int) -> Any:
        """A tensor of two or three dimensions."""
        return (self._new_matrix if len(shape) == 2 else self._new_stack)(context, type, *shape)

    def repacks(self, type: int, n: int, k: int, experts: int = 0, chosen: int = 0) -> bool:
        """Ask ggml itself, as llama.cpp does: which types it repacks depends on the machine and on the shape. With
        `experts`, of a stack of which `chosen` are multiplied."""
        if self.repack is None:
            return False
        contexts, stacked = [self.context(1), self.context(3)], (experts,) if experts else ()
        weights = self.new(contexts[0], type, k, n, *stacked)
        buffer = self.allocate(contexts[0], self.repack)  # never written to, so it takes no memory
        if experts:
            x, ids = self.new(contexts[1], F32, k, 1, 1), self.new(contexts[1], I32, chosen, 1)
            product = self.multiply_chosen(contexts[1], weights, x, ids)
        else:
            product = self.multiply(contexts[1], weights, self.new(contexts[1], F32, k, 1))
        supported = bool(self.supports(self.device, product))
        self.free_buffer(buffer)
        for context in contexts:
            self.free(context)
        return supported


def open_library(folder: Path, name: str) -> ctypes.CDLL:
    names = (f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll")
    path = next((folder / n for n in names if (folder / n).exists()), None)
    if path is None:
        raise BackendUnavailable(f"ggml: no {names[0]} in {folder}. Run: pip install llama-cpp-python")
    try:
        return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BackendUnavailable(f"ggml: {error}. Run: pip install llama-cpp-python") from None


def library_folder() -> Path:
    """Where ggml's libraries are: BILLFISH_GGML_LIB, or inside the llama_cpp package, which is not imported."""
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise BackendUnavailable(
            f"ggml: llama_cpp is missing. Set {FOLDER_VARIABLE} to a folder with libggml-base and libggml-cpu, or "
            "run: pip install llama-cpp-python"
        )
    return Path(spec.origin).parent / "lib"


class Ggml(Peer):
    family = "ggml"
    install = "llama-cpp-python"
    _loaded: dict[Path, Library] = {}  # once for both peers

    def __init__(self, repack: bool) -> None:
        self.repack = repack
        self.name = "ggml-repack" if repack else "ggml"

    def load(self) -> None:
        folder = library_folder()
        if folder not in self._loaded:
            self._loaded[folder] = Library(folder)
        self.library = self._loaded[folder]

    def version(self) -> str:
        return str(self.library.version().decode())

    def label(self, case: Case) -> str:
        stand_in = STAND_INS.get((case.format.name, case.group_size))
        return self.name if stand_in is None else f"{self.name}:{stand_in}"

    def can_run(self, case: Case) -> tuple[bool, str]:
        if case.activations != "q8":
            return False, "it quantizes x to int8"
        name = _type_name(case)
        if name not in TYPES:
            return False, f"it has no {case.label}"
        block = get_format(name).block_size
        if case.k % block:
            return False, f"its {name} takes K in multiples of {block}"
        if self.repack and not self.library.repacks(TYPES[name], case.n, case.k):
            return False, f"it does not repack {name} [{case.n}, {case.k}] on this machine"
        return True, ""

    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        ggml = self.library
        ggml.set_threads(ggml.backend, threads)
        return Graph(ggml, _ggml_tensor(case), case, cold_bytes, ggml.repack if self.repack else ggml.plain)


def _type_name(case: Case) -> str:
    key = (case.format.name, case.group_size)
    return SAME.get(key) or STAND_INS.get(key) or case.format.name


def _ggml_tensor(case: Case) -> QuantizedTensor:
    """The distinct rows in a type that ggml has."""
    name = _type_name(case)
    if (case.format.name, case.group_size) in STAND_INS:
        case = case.restated(name, case.group_size)
    if name == case.format.name:
        return case.distinct
    planes = {plane: array for plane, array in case.planes.items() if plane != "sum"}  # q8_1's, which q8_0 lacks
    if case.format.name == "u8b128":
        planes["codes"] = planes["codes"] ^ np.uint8(0x80)
    return QuantizedTensor.from_planes(name, planes)


class OnGgml(Prepared):
    """Weights in a buffer of ggml's, and one graph at a time that multiplies with them."""

    def __init__(self, ggml: Library, type: int, weights: Sequence[tuple[tuple[int, ...], Any]], buffer: Any) -> None:
        """weights: for each tensor its shape, ggml's way round, and its blocks."""
        self._ggml, self._bound, self._y = ggml, None, None
        self._context = ggml.context(len(weights))
        self._weights = [ggml.new(self._context, type, *shape) for shape, _ in weights]
        self._buffer = ggml.allocate(self._context, buffer)
        for tensor, (_, blocks) in zip(self._weights, weights, strict=True):
            ggml.write(tensor, blocks.ctypes.data, 0, blocks.nbytes)

    def _compute(self, context: Any, graph: Any, inputs: Sequence[tuple[Any, Any]]) -> Callable[[], object]:
        """The graph, bound to arrays for its inputs."""
        ggml = self._ggml
        self._unbind()
        self._bound = (context, ggml.allocate(context, ggml.plain))
        for tensor, array in inputs:
            ggml.write(tensor, array.ctypes.data, 0, array.nbytes)
        return lambda: ggml.compute(ggml.backend, graph)

    def _read(self, *shape: int) -> Floats:
        y = np.empty(shape, np.float32)
        self._ggml.read(self._y, y.ctypes.data, 0, y.nbytes)
        return y

    def _unbind(self) -> None:
        if self._bound is not None:
            self._ggml.free_buffer(self._bound[1])
            self._ggml.free(self._bound[0])
            self._bound = None

    def close(self) -> None:
        self._unbind()
        self._ggml.free_buffer(self._buffer)
        self._ggml.free(self._context)


class Graph(OnGgml):
    """One graph with a product for each copy, as a model has one for each layer."""

    def __init__(self, ggml: Library, tensor: QuantizedTensor, case: Case, cold_bytes: int, buffer: int | None) -> None:
        self._n, self._k = case.n, case.k
        blocks = case.repeated(tensor.storage["blocks"])
        self.copies = copies_for(blocks.nbytes, cold_bytes)
        # GGUF keeps the one scale of an NVFP4 tensor apart; mul_mat knows nothing of it.
        self._factor = np.float32(tensor.storage.get("global_scale", 1))
        super().__init__(ggml, TYPES[tensor.format.name], [((case.k, case.n), blocks)] * self.copies, buffer)

    def bind(self, x: Floats) -> Callable[[], object]:
        ggml, nodes = self._ggml, 2 * self.copies + 1  # leaves count too
        context = ggml.context(self.copies + 1, graph_nodes=nodes)
        taken = ggml.new(context, F32, self._k, len(x))
        graph = ggml.new_graph(context, nodes, False)
        products = [ggml.multiply(context, copy, taken) for copy in self._weights]
        for product in products:
            ggml.add_to_graph(graph, product)
        self._y, self._m = products[0], len(x)
        return self._compute(context, graph, [(taken, x)])

    def result(self) -> Floats:
        return self._read(self._m, self._n) * self._factor
