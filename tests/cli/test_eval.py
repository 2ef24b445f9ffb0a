"""`billfish eval` with several models: one table, one picture, the same numbers as one by one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llm_models import Small, write_model

import billfish as bf
from billfish.cli.main import main
from billfish.llm import evaluate, load
from billfish.llm.evaluation import Truth


@pytest.fixture
def files(tmp_path):
    """Two models, and a text."""
    paths = [tmp_path / "first.gguf", tmp_path / "second.gguf"]
    for seed, path in enumerate(paths):
        write_model(path, Small(seed=seed))
    (tmp_path / "text").write_text("abc " * 30)
    return [*map(str, paths), str(tmp_path / "text")]


def records(capsys):
    """One JSON document and nothing else: a list."""
    return json.loads(capsys.readouterr().out)


def test_several_models_get_the_numbers_that_each_gets_alone(files, capsys):
    first, second, text = files
    common = ["--text", text, "--against", first, "--activations", "exact", "--json"]
    assert main(["eval", first, second, *common]) == 0
    together = records(capsys)
    alone = []
    for path in (first, second):
        assert main(["eval", path, *common]) == 0
        alone += records(capsys)
    assert together == alone
    assert together[0]["divergence"] == 0
    assert together[1]["divergence"] > 0


def test_the_window_in_json_is_the_one_that_was_used(files, capsys):
    first, second, text = files
    for words, window in (([], 128), (["--against", second], 128), (["--window", "20"], 20)):  # 128: the context
        assert main(["eval", first, "--text", text, "--json", *words]) == 0
        assert [record["window"] for record in records(capsys)] == [window]


def test_the_table(files, capsys):
    first, second, text = files
    assert main(["eval", first, second, "--text", text, "--against", first]) == 0
    head, rule, *rows, last = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-1]] == [
        "model",
        "bits per weight",
        "perplexity",
        "KL divergence",
        "same best token",
    ]
    assert set(rule) <= set("|- ")
    assert [row.split()[1] for row in rows] == ["first.gguf", "second.gguf"]
    assert "KL from first.gguf" in last
    assert main(["eval", first, second, "--text", text]) == 0
    assert "KL" not in capsys.readouterr().out


def test_the_picture(files, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    first, second, text = files
    drawn = tmp_path / "picture.png"
    assert main(["eval", first, second, "--text", text, "--against", first, "--plot", str(drawn)]) == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for odd, message in (
        (["--plot", str(drawn)], "--against MODEL"),
        (["--plot", str(tmp_path / "picture.gif"), "--against", first], ".png"),
    ):
        assert main(["eval", first, "--text", text, *odd]) == 2
        assert message in capsys.readouterr().err


def test_standard_errors_by_hand(files):
    model, other = (load(path) for path in files[:2])
    tokens = np.random.default_rng(1).integers(4, 260, 70).tolist()
    found = evaluate(model, tokens, against=other, window=40, activations="exact")
    losses, divergences, same = [], [], []
    for part in (tokens[:40], tokens[40:]):
        p, q = (_probabilities(m.logits(part)[:-1]) for m in (other, model))
        losses += [-np.log(row[token]) for row, token in zip(q, part[1:], strict=True)]
        divergences += (p * np.log(p / q)).sum(axis=1).tolist()
        same += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    for name, values in (("loss", losses), ("divergence", divergences), ("same_best", same)):
        assert getattr(found, f"{name}_error") == pytest.approx(np.std(values) / len(values) ** 0.5, rel=1e-6)


def _probabilities(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def test_a_truth_is_of_one_text(files):
    model, other = (load(path) for path in files[:2])
    truth = Truth(other, [5, 6, 7, 8] * 10, window=20)
    assert evaluate(model, [5, 6, 7, 8] * 10, against=truth) == evaluate(
        model, [5, 6, 7, 8] * 10, against=other, window=20
    )
    for tokens, window in (([5, 6, 7, 9] * 10, None), ([5, 6, 7, 8] * 10, 10)):
        with pytest.raises(bf.DataError, match=r"against=.*other tokens or windows"):
            evaluate(model, tokens, against=truth, window=window)


def test_bits_per_weight_are_those_of_the_layers(files):
    tensors = load(files[0]).decoder.tensors
    formats = {tensors.source.tensors.describe(f"{part.name}.weight").format.name for part in tensors.matrices}
    assert formats == {"q8_0"}
    assert tensors.bits_per_weight == 8.5
