"""A format for each matrix: the choice beside all choices there are, plans as files, and the command."""

from __future__ import annotations

import itertools
import math
import re

import llm_architectures
import numpy as np
import pytest
from llm_models import Small, write_model

import billfish as bf
from billfish.cli.main import main
from billfish.llm import evaluate, load
from billfish.quantizing import quantize_checkpoint as quantizing
from billfish.quantizing import sensitivity as damage
from billfish.quantizing.bit_plan import BitPlan, FormatChoice, PlannedMatrix, choose_formats, lower_edge, plan_of


def random_choices(seed, matrices=5, formats=4):
    rng = np.random.default_rng(seed)
    found = {}
    for i in range(matrices):
        weights = int(rng.integers(1, 4)) * 32
        bits = rng.choice([3.0, 4.25, 4.5, 5.5, 6.0, 8.5], formats, replace=False)
        offered = [FormatChoice(f"f{b}", float(b) * weights, float(rng.random() ** 3 * 2.0**-b)) for b in bits]
        found[PlannedMatrix(f"blk.{i}.a.weight", i, "a", weights)] = offered
    return found


def total(chosen, field):
    return sum(getattr(choice, field) for choice in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_but_for_the_bits_that_are_left(seed):
    choices = random_choices(seed)
    weights = sum(matrix.weights for matrix in choices)
    every = [(total(each, "bits"), total(each, "damage")) for each in itertools.product(*choices.values())]
    for bits in (4.6, 5.0, 6.1, 9.0):
        if min(spent for spent, _ in every) > bits * weights:
            with pytest.raises(bf.DataError, match=r"--bits.*at least"):
                choose_formats(choices, bits)
            continue
        chosen = choose_formats(choices, bits).values()
        spent, hurt = total(chosen, "bits"), total(chosen, "damage")
        assert spent <= bits * weights
        # Gains are taken in their order, so nothing that costs one step less than what there is hurts less.
        step = max(max(c.bits for c in offered) - min(c.bits for c in offered) for offered in choices.values())
        cheaper = [damage for other, damage in every if other <= bits * weights - step]
        assert not cheaper or hurt <= min(cheaper) + 1e-12


def test_the_lower_edge():
    points = [
        FormatChoice("a", 4, 1.0),
        FormatChoice("b", 5, 0.9),
        FormatChoice("c", 6, 0.2),
        FormatChoice("d", 6, 0.5),
        FormatChoice("e", 8, 0.3),
    ]
    assert [choice.format for choice in lower_edge(points)] == ["a", "c"]
    assert [choice.format for choice in lower_edge(points[1:2])] == ["b"]


def test_a_plan_reads_as_rules():
    chosen = {
        PlannedMatrix(f"blk.{layer}.{kind}.weight", layer, kind, 32): FormatChoice(format, 0, 0)
        for layer, kind, format in [(0, "up", "q8_0"), (1, "up", "q4_0"), (10, "up", "q8_0"), (0, "v", "q4_0")]
    }
    plan = plan_of(
        {**chosen, PlannedMatrix("blk.1.v.weight", 1, "v", 96): FormatChoice("q4_0", 0, 0)}, ["what was measured"]
    )
    assert plan.text() == "# what was measured\n^blk\\.(0|10)\\.up\\.weight$=q8_0\n=q4_0\n"
    [pattern] = plan.keep
    assert re.search(pattern, "blk.10.up.weight")
    assert not re.search(pattern, "blk.1.up.weight")


def test_a_plan_in_a_file(tmp_path):
    plan = BitPlan("q4_0", {"^a$": "q8_0", "b=c": "fp4:64"}, ("for people",))
    plan.save(tmp_path / "plan")
    assert BitPlan.load(tmp_path / "plan") == BitPlan("q4_0", plan.keep)
    for text, message in (
        ("a=q8_0\n", "plan has no line =FORMAT"),
        ("no rule\n=q4_0\n", "'no rule'"),
        ("a=q8_0\na=q4_0\n=q4_0\n", "'a=q4_0'"),
        ("a=\n=q4_0", "'a='"),
    ):
        (tmp_path / "plan").write_text(text)
        with pytest.raises(bf.DataError, match=message):
            BitPlan.load(tmp_path / "plan")


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path / "model.gguf", Small(quantization="F32", layers=3))
    return str(tmp_path / "model.gguf")


def quantize(*words):
    return main(["quantize", *map(str, words)])


def test_bits_are_the_average_and_the_plan_can_be_edited(model, tmp_path, capsys):
    plan, out = tmp_path / "plan", tmp_path / "out.gguf"
    assert quantize(model, out, "--bits", 6, "--formats", "q4_0,q8_0", "--plan", plan) == 0
    written = load(out).decoder.tensors
    assert written.bits_per_weight <= 6
    assert written.bits_per_weight > 5, "bits that could be spent were left"
    rules = BitPlan.load(plan)
    assert {rules.format, *rules.keep.values()} == {"q4_0", "q8_0"}
    assert "bits per weight. KL divergence" in plan.read_text()
    assert "more than --bits" not in capsys.readouterr().err
    assert quantize(model, tmp_path / "again.gguf", "--bits", 6, "--plan", plan, "--keep", "token_embd=q8_0") == 0
    assert "more than --bits" not in capsys.readouterr().err
    plan.write_text("=q8_0\n")
    assert quantize(model, tmp_path / "edited.gguf", "--bits", 6, "--plan", plan) == 0
    assert "8.500 bits per weight on average, more than --bits 6" in capsys.readouterr().err
    assert load(tmp_path / "edited.gguf").decoder.tensors.bits_per_weight == 8.5
    assert not list(tmp_path.glob("*.partial*"))


def test_gptq_follows_the_plan_in_order(model, tmp_path):
    """The plan is measured with mean squares. The weights then are those of the same plan from a file."""
    plan, text, formats = tmp_path / "plan", tmp_path / "text.txt", ("--bits", 6, "--formats", "q4_0,q8_0")
    text.write_text("ab abba, what is this? A few words of a text; 12 numbers and more. " * 6)
    how = (*formats, "--plan", plan, "--method", "gptq", "--calibrate", text)
    assert quantize(model, tmp_path / "out.gguf", *how) == 0
    assert quantize(model, tmp_path / "again.gguf", *how) == 0
    assert quantize(model, tmp_path / "other.gguf", *how, "--no-sequential") == 0
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes()
    assert (tmp_path / "out.gguf").read_bytes() != (tmp_path / "other.gguf").read_bytes()
    assert not list(tmp_path.glob("*.partial*"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("qwen3moe", r"mlp\.experts\.\d+\.down_proj\.weight$=q8_0"),  # a matrix for each expert
        ("granitemoe", r"block_sparse_moe\.input_linear\.weight$=q8_0"),  # gate and up in one stack
    ],
)
def test_experts_of_a_folder_have_one_rule(tmp_path, name, rule):
    """Whatever the folder has for a stack of GGUF, and whatever the output has for it, the average is kept."""
    llm_architectures.write_model(tmp_path / name, name)
    for out in ("out", "out.gguf"):
        plan = tmp_path / "plan"  # made once
        assert quantize(tmp_path / name, tmp_path / out, "--bits", 6, "--formats", "mxfp4,q8_0", "--plan", plan) == 0
        assert rule in plan.read_text()
        assert "# bits by role: attention " in plan.read_text()
        written = [about for about in map(bf.load(tmp_path / out).describe, bf.load(tmp_path / out)) if about.format]
        bits = 8 * sum(about.nbytes for about in written) / sum(math.prod(about.shape) for about in written)
        assert 5.5 < bits <= 6


def test_the_plan_is_printed_without_a_file(model, tmp_path, capsys):
    assert quantize(model, tmp_path / "out.gguf", "--bits", 8.5, "--formats", "q4_0,q8_0") == 0
    assert "\n=q8_0\n" in capsys.readouterr().err


@pytest.mark.full
def test_a_measurement_goes_on_where_it_was_stopped(model, tmp_path, monkeypatch):
    passes = []

    def counted(*arguments, **options):
        passes.append(arguments)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return evaluate(*arguments, **options)

    monkeypatch.setattr(damage, "evaluate", counted)
    kept, formats = tmp_path / "kept", ("q4_0", "q8_0")
    with pytest.raises(KeyboardInterrupt):
        damage.plan_bits(tmp_path / "model.gguf", 5, formats=formats, kept=kept)
    plan = damage.plan_bits(tmp_path / "model.gguf", 5, formats=formats, kept=kept)
    assert len(passes) - 1 == 7 * 2 + 3  # two were known, one was begun twice
    assert plan == damage.plan_bits(tmp_path / "model.gguf", 5, formats=formats, kept=kept)
    assert len(passes) - 1 == 7 * 2 + 3  # all are known
    kept.write_bytes(b'{"run": 1')  # damaged: all is measured anew
    assert plan == damage.plan_bits(tmp_path / "model.gguf", 5, formats=formats, kept=kept)
    assert plan == damage.plan_bits(tmp_path / "model.gguf", 5, formats=formats)


def names_by_format(path):
    checkpoint = bf.load(path)
    found = {}
    for about in map(checkpoint.describe, checkpoint):
        if about.format is not None:
            found.setdefault(about.format.name, []).append(about.name)
    return found


@pytest.mark.parametrize("edited", [False, True])
def test_only_limits_the_plan(model, tmp_path, edited):
    """Rules of the plan are for what --only finds, whether the plan was measured or a person wrote it."""
    plan, out = tmp_path / "plan", tmp_path / "out.gguf"
    if edited:
        plan.write_text("ffn_up=q8_0\nattn_q=q8_0\n=q4_0\n")
    words = ["--bits", 6, "--formats", "q4_0,q8_0", "--plan", plan, "--only", "ffn_"]
    assert quantize(model, out, *words) == 0
    found = names_by_format(out)
    assert set(found) == {"q4_0", "q8_0"}
    assert all("ffn_" in name for names in found.values() for name in names)
    assert sum(map(len, found.values())) == 9
    assert "attn" not in "".join(BitPlan.load(plan).keep) or edited


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["taken.gguf"], "exists"),
        (["out", "--to", "gptq", "--formats", "u4b8:32,u8b128:32"], "gptq has one setting for all modules"),
        (["out", "--to", "mlx", "--formats", "q4_0,fp4", "--bits", 4.5], "fp4"),
        (["out.gguf", "--only", "nosuch"], "matches no tensor"),
        (["out.gguf", "--keep", "nosuch=q8_0"], "matches no tensor"),
        (["out.gguf", "--bits", 3, "--calibrate"], "--bits"),
    ],
)
def test_the_output_is_checked_before_anything_is_measured(model, tmp_path, monkeypatch, capsys, words, message):
    def measured(*arguments, **options):
        raise AssertionError("a model runs")

    monkeypatch.setattr(quantizing, "plan_bits", measured)
    monkeypatch.setattr(quantizing, "calibrated", measured)
    (tmp_path / "taken.gguf").write_text("")
    bits = [] if "--bits" in words else ["--bits", 6]
    assert quantize(model, tmp_path / words[0], *bits, *words[1:]) == 2
    assert message in capsys.readouterr().err


def test_whole_rows_can_be_chosen(model, tmp_path):
    out = tmp_path / "out"
    assert quantize(model, out, "--bits", 4.6, "--formats", "u4b8:-1,q8_0") == 0
    about = bf.load(out).describe("model.layers.0.mlp.up_proj.weight")
    assert about.group_size == about.shape[1]


def test_what_cannot_be(model, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    for words, message in (
        (["--bits", 3], r"--bits.*3.0.*at least 4.25"),
        (["--bits", 99], "--format q8_0"),
        (["--bits", "nan"], r"--bits.*nan"),
        (["--bits", 5, "--formats", "q4_0,q4_0"], "--formats.*q4_0,q4_0.*different"),
        (["--bits", 5, "--formats", "q4_0,fp4:x"], "'fp4:x'"),
        (["--bits", 5, "--group-size", 64], "--group-size.*--bits.*--formats"),
        (["--format", "q4_0", "--plan", "p"], "--plan.*--bits"),
    ):
        assert quantize(model, out, *words) == 2
        assert re.search(message, capsys.readouterr().err)
    write_model(tmp_path / "quantized.gguf", Small())
    assert quantize(tmp_path / "quantized.gguf", out, "--bits", 5) == 2
    assert "--requantize" in capsys.readouterr().err
    assert not out.exists()
