"""quantize_model(merge=True): joint layers give what separate ones give, however they are called, saved or loaded."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import mlx.nn
import pytest
import torch

import billfish as bf
from billfish.nn.torch.linear import MarlinLinear

transformers = pytest.importorskip("transformers")

from billfish.nn.transformers import load_model  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 80,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,  # has biases
    "qwen3": transformers.Qwen3Config,  # has norms of heads
    "mistral": transformers.MistralConfig,
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "smollm3": transformers.SmolLM3Config,
    "phi": transformers.PhiConfig,  # dense instead of o_proj, no gate
    "olmo2": transformers.Olmo2Config,
}
TOKENS = torch.tensor([[1, 5, 7, 2, 9], [3, 3, 8, 1, 4]])


def make_model(kind="llama", **more):
    torch.manual_seed(0)
    config = CONFIGS[kind](**SIZES, pad_token_id=0, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases that are not zero
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def make_both(kind="llama", format="q4_0", **more):
    """(A model with separate layers, the same with joint ones, its report.)"""
    model = make_model(kind)
    merged = copy.deepcopy(model)
    bf.quantize_model(model, format, method="rtn", progress=False, **more)
    return model, merged, bf.quantize_model(merged, format, method="rtn", progress=False, merge=True, **more)


def attention(model):
    return model.get_submodule("model.layers.0.self_attn")


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_architecture_gives_the_same_logits(kind):
    model, merged, report = make_both(kind)
    with torch.no_grad():
        # Gemma's gelu of a part, which is no memory of its own, may differ in the last bit.
        torch.testing.assert_close(merged(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(
            merged.generate(TOKENS, max_new_tokens=4, do_sample=False),
            model.generate(TOKENS, max_new_tokens=4, do_sample=False),
        )
    assert report.apart == {}
    paths = [layer.path for layer in report.replaced]
    assert "model.layers.1.self_attn.qkv_proj" in paths
    assert ("model.layers.1.mlp.gate_up_proj" in paths) == (kind != "phi")
    assert not any("q_proj" in path for path in paths)
    assert isinstance(attention(merged).qkv_proj, MarlinLinear)
    assert isinstance(attention(merged), type(attention(model)))


@pytest.mark.parametrize("format", ["u4", "fp4", "q4_k", "nvfp4", "mxfp4", "affine4"])
def test_formats(format):
    """Rows are quantized one by one. Only nvfp4 has a scale for all of a matrix, which joint layers share."""
    config = CONFIGS["llama"](**SIZES | {"hidden_size": 256, "intermediate_size": 256})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    merged = copy.deepcopy(model)
    for each, merge in ((model, False), (merged, True)):
        bf.quantize_model(each, format, method="rtn", progress=False, merge=merge)
    with torch.no_grad():
        y, expected = merged(TOKENS).logits, model(TOKENS).logits
    assert torch.equal(y, expected) or (format == "nvfp4" and (y - expected).norm() < 0.15 * expected.norm())
    state = merged.state_dict()
    assert state.keys() == model.state_dict().keys()
    other = copy.deepcopy(model)
    other.load_state_dict(state)  # the ordinary names, in a model that is not merged
    with torch.no_grad():
        assert torch.equal(other(TOKENS).logits, y)


def test_a_state_dict_goes_both_ways(tmp_path):
    model, merged, _ = make_both("qwen2")
    for key, value in merged.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
        assert value.is_contiguous()
    blank = copy.deepcopy(merged)
    with torch.no_grad():
        for tensor in blank.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.zero_()
        assert not torch.equal(blank(TOKENS).logits, model(TOKENS).logits)
        blank.load_state_dict(model.state_dict())
        assert torch.equal(blank(TOKENS).logits, model(TOKENS).logits)
    file = io.BytesIO()
    torch.save(merged.state_dict(), file)
    file.seek(0)
    blank.load_state_dict(torch.load(file), assign=True)
    with torch.no_grad():
        assert torch.equal(blank(TOKENS).logits, model(TOKENS).logits)


def test_a_state_dict_that_does_not_fit_is_refused():
    _, merged, _ = make_both()
    state = merged.state_dict()
    name = "model.layers.0.self_attn.{}.blocks"
    state[name.format("q_proj")], state[name.format("k_proj")] = (
        state[name.format("k_proj")],
        state[name.format("q_proj")],
    )
    with pytest.raises(RuntimeError, match=r"q_proj\.blocks.*parts of 256 rows in one format"):
        merged.load_state_dict(state)
    del state[name.format("q_proj")]
    with pytest.raises(RuntimeError, match="qkv_proj"):
        merged.load_state_dict(state)


def test_gradients_of_x_and_biases():
    model, merged, _ = make_both("qwen2")
    found = []
    for each in (model, merged):
        x = each.get_input_embeddings()(TOKENS).detach().requires_grad_()
        each(inputs_embeds=x).logits.square().sum().backward()
        found.append((x.grad, each))
    merged.activation_checkpointing_enable()
    x = x.detach().requires_grad_()
    merged.train()(inputs_embeds=x).logits.square().sum().backward()
    for gradient in (found[1][0], x.grad):
        torch.testing.assert_close(gradient, found[0][0], rtol=1e-4, atol=1e-5)
    merged.zero_grad()
    merged(inputs_embeds=x).logits.square().sum().backward()
    parts = [getattr(attention(model), name).bias.grad for name in ("q_proj", "k_proj", "v_proj")]
    torch.testing.assert_close(attention(merged).qkv_proj.bias.grad, torch.cat(parts), rtol=1e-4, atol=1e-5)


def test_compiled_and_exported():
    torch.compiler.reset()
    _, merged, _ = make_both()
    block, x = merged.model.layers[0].mlp, torch.randn(2, 3, 64)
    with torch.no_grad():
        expected = block(x)
        assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x), expected)
        assert torch.equal(torch.export.export(block, (x,)).module()(x), expected)
        logits = merged(TOKENS, use_cache=False).logits
        compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(TOKENS, use_cache=False).logits, logits)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(way):
    _, merged, _ = make_both()
    with torch.no_grad():
        expected = merged(TOKENS).logits
        other = way(merged)
        assert torch.equal(other(TOKENS).logits, expected)
        other.load_state_dict(
            {name: torch.zeros_like(value) if "blocks" in name else value for name, value in other.state_dict().items()}
        )
        assert not torch.equal(other(TOKENS).logits, expected)
        assert torch.equal(merged(TOKENS).logits, expected)


def test_nothing_is_kept_from_one_call_to_the_next():
    """The same x with other contents, in turns and from several threads."""
    model, merged, _ = make_both()
    block, plain = merged.model.layers[0].mlp, model.model.layers[0].mlp
    with torch.no_grad():
        x = torch.randn(2, 64)
        for _ in range(2):
            assert torch.equal(block(x), plain(x))
            x += 1
        with torch.inference_mode():
            assert torch.equal(block(x.clone()), plain(x.clone()))
        xs = [torch.randn(3, 64) for _ in range(16)]
        with ThreadPoolExecutor(4) as pool:
            ys = list(pool.map(block, xs))
        assert all(torch.equal(y, plain(x)) for x, y in zip(xs, ys, strict=True))


class Writes(torch.nn.Module):
    """A module that writes to x between two products of it."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(64, 32, bias=False) for _ in range(2))

    def forward(self, x):
        gate = self.gate_proj(x)
        x += 1
        self.seen = gate.shape
        return gate * self.up_proj(x)


def test_x_that_is_written_to_between_two_products():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Writes())
    merged = copy.deepcopy(model)
    bf.quantize_model(model, "q4_0", method="rtn", progress=False)
    bf.quantize_model(merged, "q4_0", method="rtn", progress=False, merge=True)
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(merged(x.clone()), model(x.clone()))
    assert merged[0].seen == (3, 32)


class Helped(Writes):
    """A module whose forward leaves its products to another method."""

    def forward(self, x):
        return self.gated(x)

    def gated(self, x):
        return self.gate_proj(x) * self.up_proj(x)


class Scaled(Writes):
    """A module that writes to a part after another part is kept for its gradient."""

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        square = gate * gate
        up *= 2
        return square * up


class Inherited(Writes):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("kind", [Helped, Scaled, Inherited])
def test_modules_as_people_write_them(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(kind())
    merged = copy.deepcopy(model)
    bf.quantize_model(model, "q4_0", method="rtn", progress=False)
    report = bf.quantize_model(merged, "q4_0", method="rtn", progress=False, merge=True)
    assert report.apart == ({"0.gate_up_proj": "forward calls super()"} if kind is Inherited else {})
    ys, gradients = [], []
    for each in (model, merged):
        x = torch.ones(3, 64, requires_grad=True)
        ys.append(each(x.clone()))
        ys[-1].sum().backward()
        gradients.append(x.grad)
    assert torch.equal(ys[0], ys[1])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(torch.ones(3, 64)), ys[0])


def test_what_stays_apart_and_why():
    model = make_model()
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.gate_proj.weight
    report = bf.quantize_model(
        model,
        "q4_0",
        merge=True,
        progress=False,
        predicate=lambda path, _: (
            {"format": "q8_0"} if path == "model.layers.0.self_attn.v_proj" else "1.self_attn.k" not in path
        ),
    )
    assert report.apart == {
        "model.layers.0.self_attn.qkv_proj": "its parts have different settings",
        "model.layers.0.mlp.gate_up_proj": "somebody has put another forward in the place of the module's own",
        "model.layers.1.self_attn.qkv_proj": "a part of it is left",
        "model.layers.1.mlp.gate_up_proj": "a part of it shares its weight",
    }
    assert "no model.layers.1.mlp.gate_up_proj: a part of it shares its weight" in str(report)
    with torch.no_grad():
        model(TOKENS)


def test_attention_to_something_else_stays_apart():
    config = transformers.BartConfig(
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        vocab_size=80,
    )
    report = bf.quantize_model(transformers.BartModel(config), "q4_0", merge=True, progress=False)
    assert report.apart
    assert all("key_value_states" in reason for reason in report.apart.values())


def test_models_that_are_cut_over_processes_are_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = make_model()
        layer = attention(model).q_proj
        layer.weight = torch.nn.Parameter(torch.distributed.tensor.distribute_tensor(layer.weight.data, mesh))
        with pytest.raises(bf.DTypeError, match=r"merge: got a model that is cut over processes, as .*q_proj"):
            bf.quantize_model(model, "q4_0", merge=True, progress=False)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("format", ["q4_0", "u4", "fp4"])
def test_layers_that_are_quantized_already(format):
    model = make_model("qwen2")
    bf.quantize_model(model, format, method="rtn", progress=False)
    with torch.no_grad():
        expected = model(TOKENS).logits
        report = bf.quantize_model(model, merge=True, progress=False)
        assert torch.equal(model(TOKENS).logits, expected)
    assert report.apart == {}
    assert len(report.replaced) == 4
    assert report.bytes_saved == 0
    assert bf.quantize_model(model, merge=True, progress=False).replaced == []


def test_files(tmp_path):
    """bf.save writes the matrices of the parts; a model that was loaded can be merged and saved again."""
    model, merged, _ = make_both()
    for name, each in (("model", model), ("merged", merged)):
        bf.save(each, tmp_path / name, progress=False)
    separate, joint = bf.load(tmp_path / "model"), bf.load(tmp_path / "merged")
    assert set(joint) == set(separate)
    for name in separate:
        if isinstance(separate[name], bf.QuantizedTensor):
            for array, values in separate[name].storage.items():
                assert (joint[name].storage[array] == values).all(), name
    loaded = load_model(tmp_path / "merged")
    with torch.no_grad():
        expected = loaded(TOKENS).logits
        assert bf.quantize_model(loaded, merge=True, progress=False, predicate=lambda path, _: False).apart == {}
        assert torch.equal(loaded(TOKENS).logits, expected)
        loaded.save_pretrained(tmp_path / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(again(TOKENS).logits, expected)


def test_quantized_layers_that_stay_apart():
    for format, said in (("nvfp4", "each of its parts has a scale for all of its weights, as nvfp4 has"),):
        model = make_model()
        bf.quantize_model(model, format, method="rtn", progress=False)
        assert set(bf.quantize_model(model, merge=True, progress=False).apart.values()) == {said}
    model = make_model()
    settings = lambda path, _: {"format": "q8_0"} if "v_proj" in path else "mlp" not in path  # noqa: E731
    bf.quantize_model(model, "q4_0", predicate=settings, progress=False)
    report = bf.quantize_model(model, merge=True, progress=False, predicate=settings)
    assert report.apart["model.layers.0.self_attn.qkv_proj"] == "its parts have different settings"
    assert report.apart["model.layers.0.mlp.gate_up_proj"] == "a part of it is left"


def test_mlx_models_are_refused():
    with pytest.raises(bf.DTypeError, match=r"merge: got True with an MLX model; takes False, or a torch model"):
        bf.quantize_model(mlx.nn.Sequential(mlx.nn.Linear(64, 64)), merge=True, progress=False)


def test_adapters_go_onto_joint_layers():
    peft = pytest.importorskip("peft")
    import billfish.nn.peft  # noqa: F401

    _, merged, _ = make_both()
    with torch.no_grad():
        expected = merged(TOKENS).logits
    keys = merged.state_dict().keys()
    with pytest.raises(ValueError, match="q_proj"):
        peft.get_peft_model(copy.deepcopy(merged), peft.LoraConfig(target_modules=["q_proj"], r=4))
    model = peft.get_peft_model(merged, peft.LoraConfig(target_modules=["qkv_proj"], r=4))
    model.print_trainable_parameters()
    torch.testing.assert_close(model(TOKENS).logits, expected)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(TOKENS).logits.square().mean().backward()
    optimizer.step()
    assert not torch.allclose(model(TOKENS).logits, expected)
    assert model.unload().state_dict().keys() == keys
