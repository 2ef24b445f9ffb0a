"""Settings of a config.json, with transformers' configurations as the judge."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cases import diagonal
from transformers import AutoConfig

import billfish as bf
from billfish.checkpoints.names.gguf_names import fields_of
from billfish.models import MODEL_TYPES, describe, of_config
from billfish.models.description import Attention, Block, Matrix, Model, Stack

# Sizes that tensors have as well: those of others are refused there.
WITHOUT_A_DEFAULT = {"glm4_moe": {"head_dim": 128}}  # what transformers fills in is none that can run
SIZES = ("kv_heads", "experts", "size", "shares")


def model_of(settings: dict) -> Model:
    architecture = of_config(settings, "model")
    return describe(fields_of(architecture, architecture.completed(settings), Path("model")), 96)


def numbers_of(part: object) -> object:
    """All numbers of a description that no tensor tells."""
    if isinstance(part, (Matrix, Stack)):
        return part.name
    if isinstance(part, tuple):
        return [numbers_of(each) for each in part]
    if not dataclasses.is_dataclass(part):
        return part
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: numbers_of(value) for name, value in fields.items() if name not in (*SIZES, "context")}


def attention_of(block: Block) -> Attention:
    assert isinstance(block.mixer, Attention)
    return block.mixer


@pytest.mark.parametrize(("model_type", "third"), diagonal(3, MODEL_TYPES, range(3)))
def test_a_setting_that_is_not_named_is_what_transformers_takes_for_it(model_type, third):
    """Or it is refused. Each setting in turn is left out."""
    whole = AutoConfig.for_model(model_type).to_dict() | WITHOUT_A_DEFAULT.get(model_type, {})
    expected, compared = model_of(whole), 0
    for name in [*whole][third::3]:
        rest = {other: value for other, value in whole.items() if other != name}
        try:
            found = model_of(rest)
        except (bf.CheckpointError, bf.ModelError):
            continue
        assert numbers_of(found) == numbers_of(expected), name
        if name == "sliding_window":  # where GGUF knows no window, the context ends there
            assert found.context == expected.context
        compared += 1
    assert compared > 5


def test_null_is_not_the_default():
    """Gemma 2 without caps says so."""
    whole = AutoConfig.for_model("gemma2").to_dict()
    model = model_of(whole | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (attention_of(model.blocks[0]).cap, model.logit_cap) == (0, 0)


def test_the_base_may_be_beside_a_rule_of_the_older_name():
    whole = AutoConfig.for_model("qwen3").to_dict()
    whole["rope_scaling"] = {"type": "linear", "factor": 2.0}
    whole["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    assert model_of(whole).ropes[0].base == 5e6


def test_heads_that_rotate_in_part_are_refused_wherever_that_is_said():
    whole = AutoConfig.for_model("llama").to_dict()
    whole["rope_parameters"]["partial_rotary_factor"] = 0.5
    with pytest.raises(bf.CheckpointError, match=r"partial_rotary_factor.*0\.5.*1 for llama"):
        model_of(whole)
