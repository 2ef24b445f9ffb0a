"""No product with weights that are no longer there: every way of writing to a layer's arrays is noticed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import mlx.core as mx
import numpy as np
import pytest
import torch
from common import assert_same_bits, gaussian
from nn_frameworks import MLX, TORCH, count_packs

import billfish as bf
from billfish.nn.torch import watch, weights

BOTH = pytest.mark.parametrize("framework", [TORCH, MLX], ids=lambda f: f.name)
# A format of words, one of blocks, and one with a scale for the whole tensor.
FORMATS = pytest.mark.parametrize("format", ["u4", "q4_0", "nvfp4"])
N, K = 16, 256


def make_layer(framework, format, seed=0, act_order=False):
    order = np.random.default_rng(seed).permutation(K) if act_order else None
    tensor = bf.quantize(gaussian((N, K), seed), format)
    layer = framework.ours.MarlinLinear.from_quantized(tensor, permutation=order)
    return layer.requires_grad_(False) if framework is TORCH else layer


def product(framework, layer):
    """y as the layer gives it; what its arrays say that it must be."""
    x = gaussian((3, K), 9)
    y = framework.numpy(layer(framework.array(x)))
    storage = (
        {name: framework.arrays.to_numpy(layer[name]) for name in bf.FORMATS[layer.format].storage_names}
        if (framework is MLX)
        else {name: to_numpy(layer, name) for name in layer.storage_names}
    )
    tensor = bf.QuantizedTensor.from_storage(layer.format, storage, layer.group_size)
    return y, bf.quantized_linear(x, tensor)


def to_numpy(layer, name):
    array = np.array(layer.state_dict()[name].numpy())
    return array.view(np.uint32) if array.dtype == np.int32 else array


def check_change(framework, layer, change):
    """A product before the change, one after it, and one more, when nothing has changed again."""
    before, expected = product(framework, layer)
    assert_same_bits(before, expected)
    product(framework, layer)
    change(layer)
    for _ in range(2):
        after, expected = product(framework, layer)
        assert_same_bits(after, expected)
        assert not np.array_equal(before, after)


# ---- torch ----------------------------------------------------------------------------------------------------------


def in_inference_mode(layer, other):
    with torch.inference_mode():
        layer.load_state_dict(other.state_dict())


def through_buffers(layer, other):
    for mine, theirs in zip(layer.buffers(), other.buffers(), strict=True):
        mine.data.copy_(theirs)


def through_numpy(layer, other):
    for name in layer.storage_names:
        getattr(layer, name).numpy()[...] = getattr(other, name).numpy()


def each(write):
    """A change of one array after the other."""

    def change(layer, other):
        for name in layer.storage_names:
            write(layer, name, getattr(other, name).clone())

    return change


TORCH_CHANGES = {
    "copy_": each(lambda layer, name, value: getattr(layer, name).copy_(value)),
    "data.copy_": each(lambda layer, name, value: getattr(layer, name).data.copy_(value)),
    "data=": each(lambda layer, name, value: setattr(getattr(layer, name), "data", value)),
    "set": each(lambda layer, name, value: setattr(layer, name, value)),
    "register_buffer": each(lambda layer, name, value: layer.register_buffer(name, value)),
    "_buffers": each(lambda layer, name, value: layer._buffers.update({name: value})),
    "state_dict": each(lambda layer, name, value: layer.state_dict()[name].copy_(value)),
    "state_dict.data": each(lambda layer, name, value: layer.state_dict()[name].data.copy_(value)),
    "storage": each(lambda layer, name, value: layer.get_buffer(name).untyped_storage().copy_(value.untyped_storage())),
    "numpy": through_numpy,
    "buffers": through_buffers,
    "load": lambda layer, other: layer.load_state_dict(other.state_dict()),
    "load in inference_mode": in_inference_mode,
    "load and assign": lambda layer, other: layer.load_state_dict(copy.deepcopy(other.state_dict()), assign=True),
    "_apply": lambda layer, other: layer._apply(lambda t: t * 0),
}
TORCH_WAYS = pytest.mark.parametrize("way", TORCH_CHANGES)


@FORMATS
@TORCH_WAYS
def test_torch_sees_every_change(format, way):
    other = make_layer(TORCH, format, 1)
    check_change(TORCH, make_layer(TORCH, format), lambda layer: TORCH_CHANGES[way](layer, other))


def test_a_product_of_another_thread_does_not_keep_the_former_weights(monkeypatch):
    layer, other = (make_layer(TORCH, "q4_0", seed) for seed in (0, 1))
    x = torch.from_numpy(gaussian((3, K), 9))
    layer(x)
    own, thread = weights.own, threading.Thread(target=layer, args=(x,))

    def own_during_a_product(tensor):
        thread.start()
        thread.join(1)  # it may have to wait for the new tensor
        return own(tensor)

    blocks = other.blocks.clone()
    monkeypatch.setattr(weights, "own", own_during_a_product)
    layer.blocks = blocks
    thread.join()
    assert torch.equal(layer(x), other(x))


@FORMATS
@pytest.mark.parametrize("way", ["copy_", "data.copy_", "data=", "state_dict.data", "numpy", "load"])
def test_torch_twins_see_it_too(format, way):
    layer, other = make_layer(TORCH, format), make_layer(TORCH, format, 1)
    twin = layer.with_bias(None)
    product(TORCH, twin)
    check_change(TORCH, layer, lambda layer: TORCH_CHANGES[way](layer, other))
    assert_same_bits(product(TORCH, twin)[0], product(TORCH, layer)[0])
    twin.scales = twin.scales.clone() if "scales" in twin.storage_names else None
    copied = copy.deepcopy(torch.nn.ModuleList([layer, layer.with_bias(None)]))
    TORCH_CHANGES[way](copied[0], make_layer(TORCH, format, 2))
    assert_same_bits(product(TORCH, copied[1])[0], product(TORCH, copied[0])[0])


@FORMATS
@pytest.mark.parametrize("way", ["copy_", "data.copy_", "data=", "numpy", "state_dict.data", "load in inference_mode"])
def test_a_compiled_graph_sees_it_too(format, way):
    torch.compiler.reset()
    layer, other = make_layer(TORCH, format), make_layer(TORCH, format, 1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.from_numpy(gaussian((3, K), 9))
    before = compiled(x).clone()
    TORCH_CHANGES[way](layer, other)
    after = compiled(x)
    assert not torch.equal(before, after)
    assert_same_bits(after.numpy(), product(TORCH, layer)[1])


@FORMATS
def test_torch_tensors_that_somebody_keeps_may_be_written_to_at_any_time(format):
    layer, other = make_layer(TORCH, format), make_layer(TORCH, format, 1)
    kept, theirs = layer.storage, other.storage
    array = kept[0].numpy()
    check_change(TORCH, layer, lambda layer: kept[0].data.copy_(theirs[0]))
    check_change(TORCH, layer, lambda layer: array.fill(1))
    check_change(TORCH, layer, lambda layer: setattr(kept[0], "data", theirs[0].clone()))
    assert layer.storage[0] is kept[0]
    given = make_layer(TORCH, format, 2).storage[0].clone()
    setattr(layer, layer.storage_names[0], given)
    check_change(TORCH, layer, lambda layer: given.data.copy_(theirs[0]))


@pytest.mark.parametrize(
    "take",
    [
        lambda tensor: torch.from_dlpack(tensor).data.numpy(),
        lambda tensor: np.asarray(memoryview(tensor.numpy())),
        lambda tensor: tensor.view(torch.int8)[:1].numpy(),
        lambda tensor: torch.nn.Parameter(tensor, requires_grad=False).detach().numpy(),
        lambda tensor: torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy(),
    ],
    ids=["dlpack", "memoryview", "view", "parameter", "storage"],
)
def test_torch_memory_that_somebody_keeps_by_another_way(take):
    layer = make_layer(TORCH, "q4_0")
    kept = take(layer.blocks)
    gc.collect()
    check_change(TORCH, layer, lambda layer: kept.fill(1))
    check_change(TORCH, layer, lambda layer: kept.fill(2))


def test_torch_memory_of_others_may_be_written_to_at_any_time():
    layer = make_layer(TORCH, "q4_0")
    array = np.array(layer.blocks.numpy())
    layer.blocks = torch.from_numpy(array)
    check_change(TORCH, layer, lambda layer: array[:1].fill(7))
    array[:1] = 9
    layer.repack()  # for writes that no layer could notice, and for trust: array is written to no more
    assert_same_bits(*product(TORCH, layer))


@FORMATS
def test_an_undisturbed_layer_reads_its_weights_once(format, monkeypatch):
    """Packed once, and no digest; after state_dict() one or two, and then no more."""
    digests, packs = count_digests(monkeypatch), count_packs(monkeypatch)
    layer = make_layer(TORCH, format)
    x = torch.from_numpy(gaussian((3, K)))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for call in (layer, compiled, layer):
        call(x)
    assert (len(packs), len(digests)) == (1, 0)
    for call in (layer, compiled):
        state = layer.state_dict()
        for _ in range(3):
            call(x)
        arrays = len(layer.storage_names)
        assert len(digests) == 4 * arrays  # when they were lent, and in each call while they are
        del state
        call(x)
        assert len(digests) == 5 * arrays
        call(x)
        assert len(digests) == 5 * arrays
        digests.clear()
    assert len(packs) == 1


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "to", "load_state_dict", "with_bias"])
def test_layers_that_were_made_of_others_read_their_weights_once(way, monkeypatch):
    layer = make_layer(TORCH, "u4")
    if way == "deepcopy":
        layer = copy.deepcopy(layer)
    elif way == "pickle":
        layer = pickle.loads(pickle.dumps(layer))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        layer = torch.load(file, weights_only=False)
    elif way == "to":
        layer.to(torch.float16).to("cpu")
    elif way == "load_state_dict":
        layer.load_state_dict(make_layer(TORCH, "u4", 1).state_dict())
    elif way == "with_bias":
        twin = layer.with_bias(None)
        product(TORCH, twin)
    x = torch.from_numpy(gaussian((3, K)))
    layer(x)
    digests = count_digests(monkeypatch)
    layer(x)
    assert not digests


def count_digests(monkeypatch):
    digests = []
    digest_of = watch.digest_of

    def counting(array):
        digests.append(array)
        return digest_of(array)

    monkeypatch.setattr(watch, "digest_of", counting)
    return digests


def test_torch_inference_tensors_have_no_version_and_are_watched_all_the_same():
    with torch.inference_mode():
        layer = make_layer(TORCH, "q4_0")
        check_change(TORCH, layer, lambda layer: layer.blocks.fill_(3))
    check_change(TORCH, layer, lambda layer: layer.blocks.data.fill_(4))


def test_torch_tensors_with_a_watch_pickle_for_everybody():
    layer = make_layer(TORCH, "q4_0")
    blocks = layer.blocks
    layer(torch.zeros(1, K))
    file = io.BytesIO()
    torch.save(blocks, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), blocks)
    assert b"billfish.nn" not in file.getvalue()
    assert torch.equal(copy.deepcopy(blocks), blocks)


def test_an_exported_program_sees_what_is_written_to_its_own_tensors():
    layer = make_layer(TORCH, "q4_0")
    x = torch.from_numpy(gaussian((3, K), 9))
    program = torch.export.export(layer, (x,)).module()
    assert torch.equal(program(x), layer(x))
    program.blocks.data.fill_(3)
    changed = program(x)
    layer.blocks.data.fill_(3)
    assert torch.equal(changed, layer(x))


def test_packed_weights_go_with_their_layer():
    """At once: nobody has to wait for the collector, which knows nothing of the size of weights."""
    gc.disable()
    try:
        for framework in (TORCH, MLX):
            layer = make_layer(framework, "q4_0")
            x = framework.array(gaussian((3, K)))
            layer(x)
            matrix = layer._weights.current().tensor if framework is TORCH else layer._made.matrix
            packed = weakref.ref(matrix.made(("cpu", "cpu"), None))
            framework.parameters(layer)  # lends the arrays
            assert packed() is not None
            del matrix, layer
            assert packed() is None
    finally:
        gc.enable()


def test_the_digest_of_a_device_tells_words_and_their_places_apart():
    """The same on the CPU, where torch's own operations compute it too."""
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 1003).astype(np.uint8))
    known = watch.digest_of(data)
    assert watch.digest_of(data.clone()) == known
    changed = {known}
    for place in (0, 7, 8, 500, 1002):
        other = data.clone()
        other[place] ^= 128
        changed.add(watch.digest_of(other))
    changed.add(watch.digest_of(torch.cat([data[8:16], data[:8], data[16:]])))
    assert len(changed) == 7


# ---- MLX ------------------------------------------------------------------------------------------------------------


def through_parameters(layer, other):
    parameters = layer.parameters()
    for name, value in other.parameters().items():
        parameters[name][...] = value


def in_place(layer, other):
    for name, value in other.parameters().items():
        array = layer[name]
        array *= 0
        array += value


MLX_CHANGES = {
    "update": lambda layer, other: layer.update(other.parameters()),
    "load_weights": lambda layer, other: layer.load_weights(list(other.parameters().items())),
    "set item": lambda layer, other: [layer.__setitem__(name, value) for name, value in other.parameters().items()],
    "set attribute": lambda layer, other: [setattr(layer, name, value) for name, value in other.parameters().items()],
    "parameters": through_parameters,
    "in place": in_place,
}


@FORMATS
@pytest.mark.parametrize("way", MLX_CHANGES)
def test_mlx_sees_every_change(format, way):
    other = make_layer(MLX, format, 1)
    check_change(MLX, make_layer(MLX, format), lambda layer: MLX_CHANGES[way](layer, other))


@pytest.mark.parametrize("way", ["parameters", "in place"])
def test_mlx_twins_see_it_too(way):
    layer, other = make_layer(MLX, "u4"), make_layer(MLX, "u4", 1)
    twin = layer.with_bias(None)
    product(MLX, twin)
    check_change(MLX, layer, lambda layer: MLX_CHANGES[way](layer, other))
    assert_same_bits(*product(MLX, twin))
    assert_same_bits(product(MLX, twin)[0], product(MLX, layer)[0])


def test_mlx_as_people_write_it():
    def scaled(layer):
        layer.scales *= 2

    def cleared(layer):
        layer.packed[0] = 0

    def first_column(layer):
        layer.packed[:, 0:1] += 1

    layer = make_layer(MLX, "u4")
    for change in (scaled, cleared, first_column):
        for _ in range(3):
            if change is not cleared:
                check_change(MLX, layer, change)
        if change is cleared:
            check_change(MLX, layer, change)


def test_mlx_memory_is_not_mistaken_for_memory_that_was_reused():
    """MLX writes to memory that nobody else has a handle on, and gives freed memory out again."""
    layer = make_layer(MLX, "q4_0")
    for _ in range(20):
        check_change(MLX, layer, lambda layer: setattr(layer, "blocks", layer.blocks + mx.array(1, mx.uint8)))
        gc.collect()


@FORMATS
def test_mlx_packs_once(format, monkeypatch):
    packs = count_packs(monkeypatch)
    layer = make_layer(MLX, format)
    twin = layer.with_bias(None)
    for call in (layer, layer, twin):
        call(mx.array(gaussian((3, K))))
    assert len(packs) == 1
    layer.repack()
    layer(mx.array(gaussian((3, K))))
    assert len(packs) == 2


# ---- both -----------------------------------------------------------------------------------------------------------


@BOTH
@FORMATS
def test_quantized_is_a_copy(framework, format):
    layer, other = make_layer(framework, format), make_layer(framework, format, 1)
    tensor = layer.quantized()
    bits = {name: np.array(array) for name, array in tensor.storage.items()}
    if framework is TORCH:
        through_buffers(layer, other)
    else:
        in_place(layer, other)
    for name, array in tensor.storage.items():
        assert not array.flags.writeable
        assert_same_bits(array, bits[name])


@BOTH
def test_a_layer_is_no_part_of_a_copy_or_pickle_of_what_was_made(framework, monkeypatch):
    layer = make_layer(framework, "u4")
    product(framework, layer)
    size = len(pickle.dumps(layer))
    assert size < 2 * sum(array.nbytes for array in layer.quantized().storage.values()) + 4096
    packs = count_packs(monkeypatch)
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(*product(framework, clone))
    assert len([tensor for tensor in packs if tensor.shape == (N, K)]) >= 2
