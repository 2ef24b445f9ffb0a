"""Statistics of a language model: a text runs through it, layer by layer.

All windows of the text pass one layer, then the next, so the sums of one layer are in memory at a time, whatever X^T X
of all of them takes. Between layers, hidden states [tokens, hidden] are in files beside the output. A layer that is
done is written, so a run that was killed goes on with the layer that it was at, to the same bits. On a GPU, layers and
their sums are in its memory.

For sequential GPTQ, two models go side by side: the float one, and one whose matrices are quantized as soon as their
sums are there. The sums are of the second model's inputs, and of their products with the first one's. A layer takes
several steps: attention's input, its output, the input of the feed-forward network, what its last matrix multiplies.
The matrices of a step are quantized before the inputs of the next are computed. The file then has the quantized
matrices in place of their inputs' sums, for the export to take them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.entry import Entry
from billfish.checkpoints.layouts.native import NativeMatrix
from billfish.checkpoints.names.gguf_names import column_orders, gguf_parts, of_gguf_parts
from billfish.checkpoints.safetensors_files import open_safetensors
from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.checkpoints.write.plan import with_mix
from billfish.checkpoints.write.resumable_writer import Identity, Output, identity, is_current, partial_path, write
from billfish.checkpoints.write.selection import Quantization
from billfish.checkpoints.write.target import Item, storage_specs
from billfish.core.arrays import FLOATS
from billfish.core.errors import BillfishError, DataError, bad_argument, failure
from billfish.core.files import path_of, read_text, replacing
from billfish.core.format import Format
from billfish.core.progress import Progress
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor
from billfish.core.version import __version__
from billfish.llm.cpu import EXPERT_INPUT, CpuDecoder, Enough, Observe, inputs_of
from billfish.llm.devices import METAL, device_of_layers
from billfish.llm.model import load
from billfish.llm.model_files import open_source
from billfish.llm.model_weights import ExpertTensor, ModelTensors, Tensor
from billfish.models import describe
from billfish.models.description import Attention, Matrix, Stack
from billfish.ops.matmul import dequantize
from billfish.ops.quantization import quantize, sent_for_gptq
from billfish.statistics.inputs import CALL, InputStatistics, Sums
from billfish.statistics.statistics import Statistics
from billfish.statistics.statistics_file import About, Inputs, StatisticsPart, check_suffix, output_file

if TYPE_CHECKING:
    from billfish.llm.cuda_layers import CudaLayers

TOKENS, WINDOW = 32768, 512
DEFAULT_NAME = "the text that billfish carries"
WRITABLE = (".safetensors", ".gguf")  # not .dat, which has no place for a layer after the other
HEAD_INPUT = 0  # the one that the head has
QUANTIZED = "quantized-"  # before a layer, the file of what enters it in the quantized model
FLOAT = "float-"  # before an input, the file of what the float model has there in the layer that is calibrated
# Inputs of a layer, by LayerInput, whose matrices know nothing of each other. Each step depends on those before it.
STEPS = ((0,), (1,), (2, 4, 6), (3, 5))
EMBEDDING_INPUT = -1  # of the first layer: rows of the embedding, which a model with embeddings per layer multiplies


class LayerDecoder(Protocol):
    """What runs layers: a CpuDecoder or MetalLayers, with rows [rows, K] of NumPy, or CudaLayers, with DeviceRows."""

    chunk: int

    def cache(self, capacity: int) -> Any: ...
    def embed(self, tokens: list[int]) -> NDArray[np.float32]: ...
    def run_layer(
        self,
        layer: int,
        tokens: list[int],
        x: NDArray[np.float32],
        source: NDArray[np.float32] | None,
        cache: Any,
        observe: Any,
    ) -> None: ...
    def read_layer_again(self, layer: int, inputs: Sequence[int] = ...) -> None: ...
    def normalize(self, hidden: NDArray[np.float32]) -> Any: ...


class InputSums(Protocol):
    """`Sums`, or `CudaSums`."""

    def add(self, rows: Any, expert: int | None = None) -> None: ...
    def add_cross(self, rows: Any, truth: Any) -> None: ...
    def finish(self, name: str) -> InputStatistics: ...


class KeptInputs(Protocol):
    """Inputs of a layer, in the order of the text: all are put, then all are taken. `KeptFile`, or `KeptRows`."""

    def rewind(self) -> None: ...
    def put(self, number: int, rows: Any) -> None: ...
    def take(self, number: int, like: Any) -> Any: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Calibration:
    """What is to be computed: known from headers and the text, before the model is read."""

    path: Path
    tensors: ModelTensors
    text: str  # its name
    windows: list[list[int]]
    window: int
    hessian: bool
    sources: Identity
    formats: Mapping[str, tuple[Format, int]] | None = None  # of the matrices that are quantized layer by layer
    device: str = "cpu"  # or "cuda:N", "metal"
    gptq_device: str = "cpu"  # where they are quantized
    items: Sequence[Item] = ()  # what an export is to quantize
    finished: Mapping[str, Item] = field(default_factory=dict)  # matrices that the file has quantized, by GGUF's names
    summed: frozenset[str] | None = None  # matrices whose inputs' X^T X it has; None: all

    def sequential(
        self, quantization: Quantization, requantize: bool, items: Sequence[Item] = ()
    ) -> Calibration | None:
        """The same beside a model that is quantized layer by layer; None for models that cannot be run so: an encoder,
        or one whose layers share keys and values.

        items: what an export is to quantize. The file has the quantized matrices of those that it can take, in place of
        their inputs' X^T X and X^T Y."""
        model, source = self.tensors.config, self.tensors.source
        shared = any(isinstance(block.mixer, Attention) and block.mixer.shares is not None for block in model.blocks)
        if shared or model.encoder or model.per_layer_embedding is not None:
            return None
        quantization = with_mix(source.tensors, quantization)
        formats = dict[str, tuple[Format, int]]()
        for name, shape in self.shapes.items():
            about = source.tensors.describe(name)
            choice = quantization.choice(name, source.name(name), shape)
            if choice is None or (about.format is not None and not requantize) or shape[-1] % choice[0].block_size:
                continue
            formats[name] = choice[0], choice[0].check_group_size(CALL, choice[1], shape[-1])
        finished, summed = self._finished(items, formats.keys()) if items else ({}, None)
        formats |= {name: (item.format, item.group_size) for name, item in finished.items() if item.format is not None}
        place = quantization.gptq_device
        return replace(self, formats=formats, gptq_device=place, items=items, finished=finished, summed=summed)

    def _finished(self, items: Sequence[Item], quantized: Set[str]) -> tuple[dict[str, Item], frozenset[str]]:
        """By GGUF's names, the matrices that an export takes as they are quantized here, and those that it quantizes
        itself. It takes matrices of layers that become rows of its tensors: not columns in another order, and not parts
        of a matrix with one scale for all."""
        orders, found, others = column_orders(self.tensors.source.tensors), dict[str, Item](), set[str]()
        in_layers = {name for layer in self.inputs[:-1] for known in layer.values() for name in known.names}
        together = [(item, gguf_parts(item.name, item.shape, self.tensors.source.fields)) for item in items]
        for item, names in together:
            assert item.format is not None
            specs = item.format.storage_spec(item.n, item.k, item.group_size).values()
            apart = len(names) > 1 and any(spec.n_axis is None for spec in specs)
            for name in names:
                other = found.setdefault(name, item._replace(name=name, shape=self.shapes.get(name, ())))
                same = (other.format, other.group_size) == (item.format, item.group_size)
                reordered = name in orders and name != item.name
                if apart or reordered or not same or name not in quantized or name not in in_layers:
                    others.add(name)
        while spread := {n for _, names in together if others & {*names} for n in names} - others:
            others |= spread  # what becomes one is quantized as one
        finished = {name: item for name, item in found.items() if name not in others}
        return finished, frozenset((quantized | found.keys()) - finished.keys())

    def finished_tensors(self, path: Path) -> Checkpoint | None:
        """The tensors of `items` that a file of these statistics has quantized."""
        if not self.finished:
            return None
        file, stored, _ = open_safetensors(path)
        found, entries = dict[str, Entry](), dict[str, Entry]()
        for name, item in self.finished.items():
            assert item.format is not None
            parts = {part: stored[f"{name}.{part}"] for part in item.format.storage_names}
            found[name] = NativeMatrix(name, parts, item.format, item.shape, item.group_size)
        fields = self.tensors.source.fields
        for item in self.items:
            names = gguf_parts(item.name, item.shape, fields)
            if names and found.keys() >= {*names}:
                entries[item.name] = of_gguf_parts(item.name, item.shape, {n: found[n] for n in names}, fields)
        tensors = Checkpoint.of_entries(str(path), entries, {})
        tensors.files.append(file)
        return tensors

    @classmethod
    def of(
        cls,
        path: Path,
        text: str | os.PathLike[str] | None,
        hessian: bool,
        tokens: int,
        window: int | None,
        device: str = "cpu",
    ) -> Calibration:
        """Raises for a model, a text or sizes that it cannot be computed for."""
        source = open_source(path)
        config = describe(source.fields, source.vocabulary, source.tensors)
        window = min(WINDOW, config.context) if window is None else window
        if not 1 <= window <= config.context:
            raise DataError(bad_argument(CALL, "window", window, f"1 to {config.context}, the model's context"))
        if tokens < 1:
            raise DataError(bad_argument(CALL, "tokens", tokens, "1 or more"))
        content, name = named_text(text)
        windows = windows_of(source.tokenizer(), content, tokens, window)
        tensors = ModelTensors(source, config)
        where, files = device_of_layers(CALL, device, config), identity(source.tensors.files)
        return cls(path, tensors, name, windows, window, hessian, files, device=where)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))

    @property
    def run(self) -> str:
        """A digest of all that the statistics depend on."""
        content: list[Any] = [__version__, self.sources, self.windows, self.hessian, self.device.partition(":")[0]]
        if self.formats is not None:
            content.append({name: (format.name, size) for name, (format, size) in self.formats.items()})
            content.append(self.gptq_device.partition(":")[0])
            content.append([sorted(self.finished), None if self.summed is None else sorted(self.summed)])
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all matrices and stacks of experts, by GGUF's names."""
        return {f"{part.name}.weight": part.shape for part in self.tensors.weights}

    @functools.cached_property
    def inputs(self) -> list[dict[int, Inputs]]:
        """The inputs of each layer, by LayerInput, and last that of the head."""
        layers = [inputs_of(block) for block in self.tensors.config.blocks]
        found = [{i: self._inputs(parts) for i, parts in enumerate(layer) if parts} for layer in layers]
        per_layer = self.tensors.config.per_layer_embedding
        if per_layer is not None:
            found[0][EMBEDDING_INPUT] = self._inputs((per_layer.projection,))
        return [*found, {HEAD_INPUT: self._inputs((self.tensors.config.head,))}]

    def _inputs(self, parts: Sequence[Matrix | Stack]) -> Inputs:
        """What these matrices multiply. A file may hold several as one."""
        *experts, _, k = parts[0].shape
        names = tuple(dict.fromkeys(f"{part.name}.weight" for part in parts))
        embedding = parts[0].name == self.tensors.config.embedding.name  # which is more than a head
        return Inputs(names, (*experts, k), self.hessian, self.formats is not None and not experts and not embedding)

    def stored(self, known: Inputs) -> Inputs:
        """What the file has of inputs."""
        needed = self.summed is None or known in self.inputs[-1].values() or self.summed & {*known.names}
        return known if needed else known._replace(outer=False, cross=False)

    def steps(self, layer: int) -> list[list[int]]:
        """The inputs of a layer, in the order in which they are computed: those together between which nothing is
        quantized."""
        steps, inputs, formats = list[list[int]](), self.inputs[layer], self.formats or {}
        for numbers in STEPS:
            present = [number for number in numbers if number in inputs]
            quantized = steps and any(name in formats for number in steps[-1] for name in inputs[number].names)
            if quantized or not steps:
                steps.append(present)
            else:
                steps[-1] += present
        return [step for step in steps if step]

    @property
    def disk_bytes(self) -> int:
        """About what the file, the states between layers and, without CUDA, the inputs of the float model take."""
        size, rows = 0, [0]
        for layer in self.inputs:
            for known in map(self.stored, layer.values()):
                size += math.prod(known.shape) * (8 + 4 * known.shape[-1] * (known.outer + known.cross))
            if not self.device.startswith("cuda"):
                rows.append(sum(known.shape[-1] for known in layer.values() if known.cross))
        for item in self.finished.values():
            size += sum(math.prod(shape) * dtype.itemsize for dtype, shape in storage_specs(item).values())
        return size + 4 * self.tokens * (max(rows) + 4 * self.tensors.config.hidden)

    @property
    def layers(self) -> int:
        return self.tensors.config.layers

    def write(self, out: Path, progress: bool, overwrite: bool | None = None) -> None:
        """Compute the statistics, to a file. Killed at any moment, the same call goes on."""
        with Progress(len(self.inputs), "layers", enabled=progress) as bar:
            layers = Layers(self, partial_path(Path(os.path.abspath(out))) / "states", bar)
            parts = []
            for i, layer in enumerate(self.inputs):
                names = {name: None for known in layer.values() for name in known.names if name in self.finished}
                quantized = (self.finished[n]._replace(load=functools.partial(layers.finished.pop, n)) for n in names)
                make = functools.partial(layers.statistics, i)
                parts.append(StatisticsPart(f"layer {i}", (*map(self.stored, layer.values()),), make, (*quantized,)))
            about = About(
                self.tensors.config.architecture,
                self.shapes,
                self.window,
                (self.text,),
                self.run,
                self.tokens,
            )
            unchanged = functools.partial(is_current, self.tensors.source.tensors.files, self.sources)
            file = output_file(out.name, parts, about)
            try:
                write(CALL, out, Output([file], {}, False, {"run": self.run}, unchanged), overwrite=overwrite)
            finally:
                layers.close()


class Layers:
    """The layers of a model, one after the other, and the hidden states between them."""

    def __init__(self, calibration: Calibration, room: Path, bar: Progress) -> None:
        self._calibration, self._room, self._bar = calibration, room, bar
        self.finished = dict[str, QuantizedTensor | QuantizedExperts]()  # matrices of the layer, for the file
        self._known: dict[str, dict[str, Any]] = {}  # by which matrices of the layer are quantized: for `quantize`
        self._rounded: dict[str, Tensor | ExpertTensor] = {}  # those that are, as the decoder takes them
        self._quantized = set[int]()  # layers that the decoder has no floats of

    @functools.cached_property
    def _decoder(self) -> LayerDecoder:
        """Read when the first layer is asked for: a file that is complete needs no model."""
        if self._gpu is not None:
            return self._gpu
        device = self._calibration.device
        if device in METAL:
            from billfish.llm.metal_layers import MetalLayers  # here: it imports MLX

            source, config = self._calibration.tensors.source, self._calibration.tensors.config
            return MetalLayers(ModelTensors(source, config, self._converted), device)
        path, shown = self._calibration.path, self._bar.enabled
        decoder = load(path, device="cpu", convert=self._converted, progress=shown).decoder
        assert isinstance(decoder, CpuDecoder)
        return decoder

    @functools.cached_property
    def _gpu(self) -> CudaLayers | None:
        if not self._calibration.device.startswith("cuda"):
            return None
        from billfish.llm.cuda_layers import CudaLayers

        source, config = self._calibration.tensors.source, self._calibration.tensors.config
        ordinal = int(self._calibration.device.removeprefix("cuda:"))
        return CudaLayers(ModelTensors(source, config, self._converted), ordinal)

    def close(self) -> None:
        """Give the model's memory back, now: what comes next may need it. It holds this object, which holds it."""
        for name in ("_decoder", "_gpu"):
            self.__dict__.pop(name, None)
        self._known, self._rounded = {}, {}

    def statistics(self, layer: int) -> list[InputStatistics]:
        """Of all inputs of a layer; behind the last layer, of the head's."""
        inputs, sequential = self._calibration.inputs[layer], self._calibration.formats is not None
        self._room.mkdir(exist_ok=True)
        if sequential and layer and not all(map(self._has_states, (str(layer), f"{QUANTIZED}{layer}"))):
            self.statistics(layer - 1)  # somebody has cleared up
        model, last = self._calibration.tensors.config, self._calibration.layers
        needed = {str(layer), f"{QUANTIZED}{layer}", *(str(model.source(later)) for later in range(layer, last))}
        for path in self._room.iterdir():  # the layer before is written, so nobody goes back to what it began with
            if path.name not in needed:
                path.unlink()
        if sequential and layer < last:
            return self._sequential(layer)
        sums = self._sums(layer, inputs)
        if EMBEDDING_INPUT in sums:
            for states in self._states(layer):
                sums[EMBEDDING_INPUT].add(states)
        if layer == last:
            for truth, states in zip(self._states(layer), self._states(layer, sequential), strict=True):
                for start in range(0, len(states), self._decoder.chunk):
                    rows = self._decoder.normalize(states[start : start + self._decoder.chunk])
                    sums[HEAD_INPUT].add(rows)
                    if inputs[HEAD_INPUT].cross:
                        others = self._decoder.normalize(truth[start : start + self._decoder.chunk])
                        sums[HEAD_INPUT].add_cross(rows, others)
        else:
            self._pass(layer, lambda _, number, expert, rows: sums[number].add(rows, None if expert < 0 else expert))
        return [known.finish(inputs[number].names[0]) for number, known in sums.items()]

    def _sums(self, layer: int, numbers: Iterable[int]) -> dict[int, InputSums]:
        inputs, hessian = self._calibration.inputs[layer], self._calibration.hessian
        make: Callable[[Sequence[int], bool, bool], InputSums] = Sums if self._gpu is None else self._gpu.sums
        return {number: make(inputs[number].shape, hessian, inputs[number].cross) for number in numbers}

    # ---- sequential GPTQ ------------------------------------------------------------------------------------------

    def _sequential(self, layer: int) -> list[InputStatistics]:
        """Step by step: sums of the quantized model's inputs, then its matrices. Last, what enters the next layer."""
        decoder, inputs, steps = self._decoder, self._calibration.inputs[layer], self._calibration.steps(layer)
        self._known, self._rounded = {}, {}
        self.finished.clear()
        if layer in self._quantized:
            decoder.read_layer_again(layer)
            self._quantized.remove(layer)
        share = 1 / (len(steps) + 2)  # of the layer's passes
        found: dict[int, InputStatistics] = {}
        with contextlib.closing(self._room_for_inputs(layer)) as floats:
            self._float_pass(layer, floats, share)
            for step in steps:
                found |= self._quantize_step(layer, step, floats, share)
        self._quantized.add(layer)
        with replacing(self._room / f"{QUANTIZED}{layer + 1}") as file:
            for states in self._run(layer, True, share, None):
                file.write(states.data)
        self._rounded = {}
        return [found[number] for number in inputs]

    def _quantize_step(
        self, layer: int, step: list[int], floats: KeptInputs, share: float
    ) -> dict[int, InputStatistics]:
        """The statistics of a step's inputs. Its matrices are quantized then."""
        inputs, formats, sums = (
            self._calibration.inputs[layer],
            self._calibration.formats or {},
            self._sums(layer, step),
        )
        self._observe_step(layer, sums, floats, share)
        found = {number: self._finish(known, inputs[number]) for number, known in sums.items()}
        changed = [number for number in step if formats.keys() & {*inputs[number].names}]
        for number in changed:
            known = self._for_gptq(found[number], inputs[number].names[0], sums[number])
            self._known |= dict.fromkeys(inputs[number].names, known)
        if changed:
            self._decoder.read_layer_again(layer, changed)
        self._known = {}
        if self._gpu is not None:
            self._gpu.take_back()
        summed = {number for number in step if self._calibration.stored(inputs[number]).outer}
        return {i: each if i in summed else replace(each, outer=None, cross=None) for i, each in found.items()}

    def _finish(self, sums: Any, known: Inputs) -> InputStatistics:
        """The statistics of inputs. X^T X stays on a GPU where GPTQ runs there and the file is without."""
        name, calibration = known.names[0], self._calibration
        if calibration.gptq_device == "cpu" or len(known.shape) > 1 or calibration.stored(known).outer:
            finished: InputStatistics = sums.finish(name)
        else:
            finished = sums.finish(name, products=False)
        return finished

    def _for_gptq(self, found: InputStatistics, name: str, sums: Any) -> dict[str, Any]:
        """What `quantize` is told of inputs; where it runs on a GPU, of sums that are there."""
        known: dict[str, Any] = {"importance": found.importance()}
        gptq_device = self._calibration.gptq_device
        if gptq_device != "cpu" and found.counts.ndim:  # experts that no token took have the mean of the others
            return known | {"hessian": sent_for_gptq(CALL, found.hessian(name), gptq_device)}
        if gptq_device != "cpu":
            further: dict[str, Any] = sums.for_gptq()
            return known | further
        return known | {"hessian": found.hessian(name), "cross": found.mean_cross(name)}

    def _room_for_inputs(self, layer: int) -> KeptInputs:
        crossed = {n: known.shape[-1] for n, known in self._calibration.inputs[layer].items() if known.cross}
        gpu, tokens = self._gpu, self._calibration.tokens
        return KeptFile(self._room, crossed) if gpu is None else gpu.keep(crossed, tokens)

    def _float_pass(self, layer: int, kept: KeptInputs, share: float) -> None:
        """The float model's windows through a layer, to the file of the next, and its inputs to `kept`."""
        inputs = self._calibration.inputs[layer]

        def observe(_: int, number: int, expert: int, rows: Any) -> None:
            if number in inputs and inputs[number].cross:
                kept.put(number, rows)

        with replacing(self._room / str(layer + 1)) as file:
            for states in self._run(layer, False, share, observe):
                file.write(states.data)

    def _observe_step(self, layer: int, sums: Mapping[int, InputSums], floats: KeptInputs, share: float) -> None:
        """Add up the inputs of a step in the quantized model, beside the float model's of the same tokens."""
        inputs = self._calibration.inputs[layer]
        last = max(sums) if max(sums) < EXPERT_INPUT else None  # which the native decoder computes last
        floats.rewind()

        def observe(_: int, number: int, expert: int, rows: Any) -> None:
            if number in sums:
                sums[number].add(rows, None if expert < 0 else expert)
                if inputs[number].cross:
                    sums[number].add_cross(rows, floats.take(number, rows))
            if number == last:
                raise Enough

        for _ in self._run(layer, True, share, observe):
            pass

    def _run(self, layer: int, quantized: bool, share: float, observe: Observe | None) -> Iterator[NDArray[np.float32]]:
        """What leaves a layer, window by window."""
        decoder, windows = self._decoder, self._calibration.windows
        cache = decoder.cache(max(map(len, windows)))
        for tokens, states in zip(windows, self._states(layer, quantized), strict=True):
            decoder.run_layer(layer, tokens, states, None, cache, observe)
            yield states
            self._bar.advance(share * len(states) / self._calibration.tokens, f"layer {layer}")

    def _converted(self, name: str, tensor: Tensor | ExpertTensor) -> Tensor | ExpertTensor:
        """A matrix of the layer that is quantized, as floats: other matrices as they are."""
        known, formats = self._known.get(name), self._calibration.formats or {}
        if name in self._rounded or known is None or name not in formats:
            return self._rounded.get(name, tensor)
        w: Any = floats_of(tensor)
        if w.dtype.name not in FLOATS:
            return tensor
        format, group_size = formats[name]
        rounded = quantize(w, format, group_size=group_size, method="gptq", **known)
        if self._gpu is not None:
            self._gpu.take_back()
        if name in self._calibration.finished:
            self.finished[name] = rounded
        self._rounded[name] = floats_of(rounded) if self._gpu is None else rounded
        return self._rounded[name]

    # ---- states -----------------------------------------------------------------------------------------------------

    def _pass(self, layer: int, observe: Observe | None) -> None:
        """All windows through a layer, to the file of the next."""
        decoder, windows = self._decoder, self._calibration.windows
        cache, source = decoder.cache(max(map(len, windows))), self._calibration.tensors.config.source(layer)
        before: Iterator[NDArray[np.float32] | None] = repeat(None) if source is None else self._states(source)
        with replacing(self._room / str(layer + 1)) as file:
            for tokens, states in zip(windows, self._states(layer), strict=True):
                decoder.run_layer(layer, tokens, states, next(before), cache, observe)
                file.write(states.data)
                self._bar.advance(len(states) / self._calibration.tokens, f"layer {layer}")

    def _has_states(self, name: str) -> bool:
        path, hidden = self._room / name, self._calibration.tensors.config.hidden
        return path.is_file() and path.stat().st_size == 4 * hidden * self._calibration.tokens

    def _states(self, layer: int, quantized: bool = False) -> Iterator[NDArray[np.float32]]:
        """What enters a layer of the float or the quantized model, window by window: [tokens, hidden] each, to be
        overwritten."""
        windows, hidden = self._calibration.windows, self._calibration.tensors.config.hidden
        if layer == 0:
            yield from map(self._decoder.embed, windows)
            return
        path = self._room / (f"{QUANTIZED}{layer}" if quantized else str(layer))
        if not self._has_states(path.name):
            self._pass(layer - 1, None)  # somebody has cleared up
        with path.open("rb") as file:
            for window in windows:
                content = bytearray(file.read(4 * hidden * len(window)))
                yield np.frombuffer(content, np.float32).reshape(len(window), hidden)


class KeptFile:
    """Inputs of a layer in files, in the order of the text: all are put, then all are taken."""

    def __init__(self, folder: Path, numbers: Iterable[int]) -> None:
        self._files = {number: (folder / f"{FLOAT}{number}").open("w+b") for number in numbers}

    def rewind(self) -> None:
        """The next rows are the first ones."""
        for file in self._files.values():
            file.seek(0)

    def put(self, number: int, rows: NDArray[np.float32]) -> None:
        self._files[number].write(np.ascontiguousarray(rows).data)

    def take(self, number: int, like: NDArray[np.float32]) -> NDArray[np.float32]:
        """As many rows as `like` has."""
        content = self._files[number].read(4 * like.size)
        return np.frombuffer(content, np.float32).reshape(like.shape)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def floats_of(tensor: Tensor | ExpertTensor) -> NDArray[Any]:
    """A matrix [N, K], or those of experts [E, N, K]: quantized ones decoded."""
    if isinstance(tensor, QuantizedExperts):
        return np.stack([dequantize(matrix) for matrix in tensor])
    return dequantize(tensor) if isinstance(tensor, QuantizedTensor) else tensor


def calibrate_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    text: str | os.PathLike[str] | None = None,
    hessian: bool = False,
    tokens: int = TOKENS,
    window: int | None = None,
    device: str = "auto",
    overwrite: bool = False,
    progress: bool = True,
) -> Statistics:
    """Run a text through a language model and write statistics of its activations: what `billfish calibrate` does.

    It runs in float32 on the CPU, and with activations in float16 on a GPU. If the process is killed, the same call
    continues where it was, to the same bits.

    src: a model that :func:`billfish.llm.load` takes. dst: a file to create: .safetensors, or .gguf for llama.cpp's
    imatrix.
    text: a file in UTF-8; None is a text that the package carries.
    hessian: whether to keep X^T X [K, K] of each input, too.
    tokens: at most so many, from the text's beginning. window: tokens that see each other (512, or the context).
    device: "cpu", "cuda", "cuda:N" or "metal"; "auto" is the first GPU, or the CPU for what only it can calibrate.
    overwrite: whether a `dst` that exists is replaced. progress: whether to draw a bar on terminals.

    Returns the Statistics. Raises ModelError for a model that cannot be run, and DataError for a text without enough
    tokens.

        >>> known = bf.calibrate_checkpoint("model.gguf", "known.safetensors", tokens=64, window=32, progress=False)
        >>> known["blk.0.attn_q.weight"].squares.shape
        (64,)
    """
    out = path_of(CALL, dst)
    check_suffix(out, hessian, WRITABLE)
    calibration = Calibration.of(path_of(CALL, src), text, hessian, tokens, window, device)
    calibration.write(out, progress, overwrite)
    return Statistics.load(out)


@contextlib.contextmanager
def calibrated(
    checkpoint: Checkpoint,
    out: Path,
    text: bool | str | os.PathLike[str],
    hessian: bool,
    progress: bool,
    device: str,
    sequential: tuple[Quantization, bool, Sequence[Item]] | None = None,
    suffix: str = "statistics",
) -> Iterator[tuple[Statistics, Checkpoint | None]]:
    """Statistics of the model of a checkpoint, and what is quantized with them, in a file beside `out`. They stay there
    while the output may be continued: after Ctrl-C, or an error of the system.

    text: a file, or a bool for the text that the package carries.
    sequential: how weights are quantized, whether quantized ones are, and which tensors of the output: layer by layer,
    with what comes before quantized. An error where the disk has no room for it.
    """
    if not checkpoint.files:
        raise DataError(
            failure(
                CALL, "tensors in memory cannot be calibrated here", "Pass a path, or use bf.calibrate(model, batches)."
            )
        )
    path = None if isinstance(text, bool) else text
    calibration = Calibration.of(checkpoint.path, path, hessian, TOKENS, None, device)
    path = Path(f"{os.path.abspath(out)}.partial-{suffix}.safetensors")  # a name that nobody else has
    if sequential is not None:
        in_order = calibration.sequential(*sequential)
        if in_order is not None:
            _check_room(in_order, path)
            calibration = in_order
    if not path.exists() or Statistics.load(path).run != calibration.run:
        path.unlink(missing_ok=True)
        calibration.write(path, progress)
    try:
        yield Statistics.load(path), calibration.finished_tensors(path)
    except BillfishError as error:
        if not isinstance(error.__context__, OSError):  # nothing that the same command continues
            path.unlink(missing_ok=True)
        raise
    path.unlink()


def _check_room(calibration: Calibration, path: Path) -> None:
    """Raise unless the disk has room for a calibration's files, beside what an earlier run has left there."""
    kept = [path, *partial_path(path).rglob("*")]
    room = shutil.disk_usage(path.parent).free + sum(file.stat().st_size for file in kept if file.is_file())
    if calibration.disk_bytes > room:
        problem = (
            f"GPTQ in order needs {calibration.disk_bytes / 1e9:.1f} GB beside the output; {room / 1e9:.1f} GB are free"
        )
        raise DataError(failure(CALL, problem, "Free some space, or write to another disk."))


# ---- the text ----------------------------------------------------------------------------------------------------


def named_text(path: str | os.PathLike[str] | None) -> tuple[str, str]:
    """A text and its name; without a path, the text that the package carries."""
    if path is None:
        return default_text(), DEFAULT_NAME
    return read_text(CALL, "text", path), Path(path).name


def default_text() -> str:
    """Prose, code, lists, numbers and several languages, written for this purpose."""
    return resources.files("billfish.quantizing").joinpath("default_text.txt").read_text("utf-8")


def windows_of(tokenizer: Tokenizer, text: str, tokens: int, window: int) -> list[list[int]]:
    """The first tokens of a text in windows that know nothing of each other, each with the token that the model expects
    first. Those count as tokens, too."""
    ids = tokenizer.encode(text, special=False, start=False)
    start = [tokenizer.bos] if tokenizer.starts_with_bos and tokenizer.bos is not None else []
    step = window - len(start)
    if not ids or step < 1:
        problem = "the text is empty" if not ids else f"window is {window}, too short for any text"
        raise DataError(failure(CALL, problem))
    windows = [start + ids[at : at + step] for at in range(0, len(ids), step)]
    kept: list[list[int]] = []
    for part in windows:
        left = tokens - sum(map(len, kept))
        if left <= len(start):
            break
        kept.append(part[:left])
    if not kept:
        raise DataError(bad_argument(CALL, "tokens", tokens, f"{1 + len(start)} or more"))
    return kept
