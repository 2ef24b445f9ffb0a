"""Folders of small random encoders, with the tokenizers that such models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from llm_architectures import ENCODERS
from llm_folders import randomize
from transformers import AutoConfig, AutoModel, BertTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "ab", "##a", "##b", "##cd", "##d", "!"]


def write_tokenizer(folder: Path, kind: str) -> None:
    """As such models have it: WordPiece for BERT, byte-level BPE for ModernBERT."""
    if kind == "bert":
        (folder / "vocab.txt").write_text("\n".join(WORDS))
        BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
        return
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*names, *(chr(ord("@") + i) for i in range(58)), "Ġ", "ab"]
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [("a", "b")]))
    encoder.normalizer = tokenizers.normalizers.NFC()
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens(names)
    encoder.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    encoder.save(str(folder / "tokenizer.json"))
    roles = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}))


def write_encoder(folder: Path, name: str, loader: Any = AutoModel, **more: Any) -> torch.nn.Module:
    _, kind, settings = ENCODERS[name]
    config = AutoConfig.for_model(kind, **settings, **more)
    model = loader.from_config(config, attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, kind)
    return model
