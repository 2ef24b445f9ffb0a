"""Settings of a config.json, with transformers' configurations as the judge."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import AutoConfig

import billfish as bf
from billfish.checkpoints.names.config_fields import completed
from billfish.checkpoints.names.hyperparameters import ARCHITECTURE_OF, fields_of
from billfish.llm.config import Config, read_config

# Sizes that tensors have as well: those of others are refused there.
SIZES = {"kv_heads": 0, "context": 0, "experts": None, "feed_forward": 0}


def config_of(settings: dict) -> Config:
    return read_config(fields_of(completed(settings), Path("model")), 96)


def numbers_of(config: Config) -> dict:
    """All but SIZES, and of experts what no tensor tells."""
    mixture = None if config.experts is None else (config.experts.chosen, config.experts.renormalized)
    return dataclasses.asdict(dataclasses.replace(config, **SIZES)) | {"mixture": mixture}


@pytest.mark.parametrize("model_type", ARCHITECTURE_OF)
def test_a_setting_that_is_not_named_is_what_transformers_takes_for_it(model_type):
    """Or it is refused. Each setting in turn is left out."""
    whole = AutoConfig.for_model(model_type).to_dict()
    expected, compared = config_of(whole), 0
    for name in whole:
        rest = {other: value for other, value in whole.items() if other != name}
        try:
            found = config_of(rest)
        except (bf.CheckpointError, bf.ModelError):
            continue
        assert numbers_of(found) == numbers_of(expected), name
        if name == "sliding_window":  # where GGUF knows no window, the context ends there
            assert found.context == expected.context
        compared += 1
    assert compared > 20


def test_null_is_not_the_default():
    """Gemma 2 without caps says so."""
    whole = AutoConfig.for_model("gemma2").to_dict()
    config = config_of(whole | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (config.attention_cap, config.logit_cap) == (0, 0)


def test_the_base_may_be_beside_a_rule_of_the_older_name():
    whole = AutoConfig.for_model("qwen3").to_dict()
    whole["rope_scaling"] = {"type": "linear", "factor": 2.0}
    whole["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    assert config_of(whole).rope_base == 5e6


def test_heads_that_rotate_in_part_are_refused_wherever_that_is_said():
    whole = AutoConfig.for_model("llama").to_dict()
    whole["rope_parameters"]["partial_rotary_factor"] = 0.5
    with pytest.raises(bf.CheckpointError, match=r"partial_rotary_factor.*0\.5.*1 for llama"):
        config_of(whole)
