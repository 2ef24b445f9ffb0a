"""Statistics of models of torch, by hooks: against inputs that are computed apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llm_architectures import TOKENS, write_model
from transformers import AutoModelForCausalLM

import billfish as bf


class Twice(torch.nn.Module):
    """One layer that is called twice, and one that never is."""

    def __init__(self, reaches_all: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.dropout, self.reaches_all = torch.nn.Dropout(0.5), reaches_all

    def forward(self, x, attention_mask=None):
        y = self.dropout(self.a(self.a(x)))
        return self.b(y) if self.reaches_all else y


def sums(*inputs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    x = torch.cat([part.detach().reshape(-1, part.shape[-1]) for part in inputs]).double().numpy()
    return (x**2).sum(axis=0), x.T @ x


def test_every_call_of_every_layer_counts():
    model, x = Twice().train(), torch.randn(3, 5, 8)
    known = bf.calibrate(model, [x, (x + 1,), {"x": x * 2}], hessian=True, progress=False)
    assert model.training
    assert model.dropout.training
    model.eval()
    inputs = [x, x + 1, x * 2]
    squares, outer = sums(*inputs, *(model.a(part) for part in inputs))
    assert known["a.weight"].counts == 90
    np.testing.assert_allclose(known["a.weight"].squares, squares, rtol=1e-5)
    np.testing.assert_allclose(known["a"].outer, outer, rtol=1e-4, atol=1e-3)
    squares, _ = sums(*(model.a(model.a(part)) for part in inputs))
    np.testing.assert_allclose(known["b.weight"].squares, squares, rtol=1e-5)
    assert known.shapes == {"a.weight": (8, 8), "b.weight": (4, 8)}
    assert not model.a._forward_pre_hooks


def test_tokens_that_the_mask_hides_do_not_count():
    model, x = Twice(), torch.randn(2, 4, 8)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    known = bf.calibrate(model, [{"x": x, "attention_mask": mask}], progress=False)
    model.eval()
    squares, _ = sums(x[mask.bool()], model.a(x)[mask.bool()])
    np.testing.assert_allclose(known["a.weight"].squares, squares, rtol=1e-5)
    assert known["b.weight"].counts == 5


def test_experts_do_not_count_hidden_tokens():
    """Nor do Linear layers that see all tokens of a batch in one row, as the shared expert's."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=48, shared_expert_intermediate_size=40,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config).eval()
    batch = {"input_ids": torch.arange(12).reshape(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    known = bf.calibrate(model, [batch], progress=False)
    assert known["blk.0.ffn_gate_exps.weight"].counts.sum() == known["blk.0.ffn_down_exps.weight"].counts.sum() == 20
    assert known["blk.0.ffn_down_shexp.weight"].counts == known["blk.0.attn_q.weight"].counts == 10


def test_quantized_layers_are_seen():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8))
    bf.quantize_model(model, "q4_0", progress=False)
    known = bf.calibrate(model, [torch.randn(6, 32)], progress=False)
    assert list(known) == ["0.weight", "1.weight"]


def test_what_cannot_be_calibrated_is_refused_by_name():
    with pytest.raises(bf.DTypeError, match=r"calibrate.*model.*list.*torch\.nn\.Module"):
        bf.calibrate([], [])
    with pytest.raises(bf.DataError, match=r"no batch.*b\.weight"):
        bf.calibrate(Twice(reaches_all=False), [torch.randn(2, 8)], progress=False)
    with pytest.raises(bf.DataError, match="a model with Linear layers"):
        bf.calibrate(torch.nn.Sequential(torch.nn.ReLU()), [torch.randn(2, 8)], progress=False)
    with pytest.raises(bf.DataError, match=r"a\.weight.*sums of squares"):
        bf.calibrate(Twice(), [torch.full((2, 8), torch.inf)], progress=False)


@pytest.mark.parametrize("name", ["qwen3next", "granitehybrid", "granitehybrid-moe"])
def test_matrices_that_gguf_has_apart_are_known_by_their_module(tmp_path, name):
    write_model(tmp_path / "in", name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    known = bf.calibrate(model, [{"input_ids": torch.tensor([TOKENS])}], progress=False)
    file = bf.calibrate_checkpoint(tmp_path / "in", tmp_path / "s.safetensors", tokens=64, window=32, progress=False)
    for each in ("blk.0.ssm_out.weight", *(part for part in file if "exps" not in part and "gate_inp" not in part)):
        if ".0." in each:
            assert known[each].squares.shape == file[each].squares.shape
    for statistics, out in ((known, "m.gguf"), (file, "out")):
        report = bf.quantize_checkpoint(tmp_path / "in", tmp_path / out, "q4_0", statistics=statistics)
        assert any(tensor.done == "quantized" for tensor in report.tensors)


def test_each_expert_of_a_mixture_is_known_by_its_tokens():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    [experts] = [module for module in model.modules() if type(module).__name__ == "MixtralExperts"]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    experts.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[:2]))
    known = bf.calibrate(model, [torch.arange(8).reshape(1, 8)], hessian=True, progress=False)
    [(x, chosen)] = seen
    [up] = [name for name in known if name.endswith("experts.gate_up_proj")]
    down = up.replace("gate_up_proj", "down_proj")
    assert known[up].squares.shape == (6, 32)
    assert known[down].outer.shape == (6, 48, 48)
    assert known[up].counts.sum() == 16
    for expert in range(6):
        rows = x[(chosen == expert).any(dim=1)]
        gate, both = (rows @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        for name, inputs in ((up, rows), (down, torch.nn.functional.silu(gate) * both)):
            squares, outer = sums(inputs)
            assert known[name].counts[expert] == len(rows)
            np.testing.assert_allclose(known[name].squares[expert], squares, rtol=1e-4, atol=1e-12)
            np.testing.assert_allclose(known[name].outer[expert], outer, rtol=1e-3, atol=1e-9)
    # The names of a GGUF file, or of a folder with gate and up apart, find them.
    assert known["blk.0.ffn_gate_exps.weight"] is known[up]
    assert known["blk.0.ffn_down_exps.weight"] is known[down]
