"""Tokenizers between GGUF's fields and the files that transformers and mlx-lm look for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from billfish.checkpoints.tokenizer.gguf_tokenizer import ROLES, merges_of, read_metadata
from billfish.checkpoints.tokenizer.pre_tokenizers import cut_of
from billfish.checkpoints.tokenizer.tokenizer import ENDS, NORMAL, Tokenizer
from billfish.checkpoints.tokenizer.tokenizer_json import chat_template, read_folder
from billfish.checkpoints.write.target import json_bytes
from billfish.core.errors import ModelError, bad_argument, failure

CALL = "convert"
FILE_ROLES = ("bos", "eos", "unk", "pad")  # those that tokenizer_config.json has a place for


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json; raises ModelError for a kind of tokenizer that we do not know."""
    tokenizer = read_metadata(metadata)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["add_bos_token"] = tokenizer.starts_with_bos
    roles = tokenizer.roles
    config |= {f"{role}_token": tokenizer.pieces[roles[role]] for role in FILE_ROLES if role in roles}
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if length is not None:
        config["model_max_length"] = length
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    whole = tokenizer.encoder.to_str(pretty=True)
    return {"tokenizer.json": whole.encode(), "tokenizer_config.json": json_bytes(config)}


def tokenizer_fields(folder: Path, vocabulary: int) -> dict[str, Any]:
    """GGUF's fields for the tokenizer of a folder, whose embedding has `vocabulary` rows. Raises ModelError for a
    tokenizer that GGUF has no words for: with one that is nearly right, a model would be nearly right."""
    tokenizer = read_folder(folder, vocabulary)
    if len(tokenizer.pieces) > vocabulary:
        problem = f"tokenizer.json has {len(tokenizer.pieces)} tokens, and the embedding has {vocabulary} rows"
        raise ModelError(failure(CALL, problem))
    about = json.loads(tokenizer.encoder.to_str())
    if about["model"].get("type") != "BPE":
        raise ModelError(bad_argument(CALL, "model type of tokenizer.json", about["model"].get("type"), "BPE"))
    fields = _byte_level(tokenizer, about) if tokenizer.byte_level else _sentencepiece(tokenizer, about)
    fields |= {"tokens": list(tokenizer.pieces), "token_type": list(tokenizer.kinds)}
    fields |= {f"{ROLES[role]}_token_id": token for role, token in tokenizer.roles.items()}
    others = sorted(end for end in tokenizer.ends - {tokenizer.roles.get("eos")} if tokenizer.pieces[end] not in ENDS)
    fields |= {f"{role}_token_id": end for role, end in zip(("eot", "eom"), others, strict=False)}
    fields["add_bos_token"] = tokenizer.starts_with_bos
    template = chat_template(folder)
    named = {} if template is None else {"tokenizer.chat_template": template}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()} | named


def _byte_level(tokenizer: Tokenizer, about: Mapping[str, Any]) -> dict[str, Any]:
    if _parts(about, "normalizer") not in ([], [{"type": "NFC"}]):  # Qwen has NFC, which llama.cpp leaves out
        raise _unknown(about, "normalizer", "none, or NFC")
    merges = [" ".join(pair) for pair in about["model"]["merges"]]
    return {"model": "gpt2", "pre": cut_of(tokenizer.encoder.pre_tokenizer), "merges": merges}


def _sentencepiece(tokenizer: Tokenizer, about: Mapping[str, Any]) -> dict[str, Any]:
    """Scores instead of merges: the earlier a merge, the better the piece that it makes. The scores must lead back to
    the same merges."""
    model = about["model"]
    if not model.get("byte_fallback"):
        raise ModelError(failure(CALL, "tokenizer.json has neither byte-level BPE nor byte_fallback"))
    normal, pieces = set[str](), list(tokenizer.pieces)
    for piece, token in model["vocab"].items():
        pieces[token] = piece  # with "▁", where GGUF has a space in some
        if tokenizer.kinds[token] == NORMAL:
            normal.add(piece)
    made = [pair[0] + pair[1] for pair in model["merges"]]
    ranks = {piece: rank for rank, piece in enumerate(dict.fromkeys(made))}
    scores = [-float(ranks.get(piece, len(ranks))) for piece in pieces]
    theirs, ours = (
        [(left, right) for left, right in merges if left + right in normal]  # the others are found as they are
        for merges in (model["merges"], merges_of(pieces, scores))
    )
    if set(theirs) != set(ours) or _in_turn(theirs) != _in_turn(ours):
        problem = "the merges of tokenizer.json are not those of a SentencePiece model, so GGUF cannot store them"
        raise ModelError(failure(CALL, problem))
    return {"model": "llama", "scores": scores, "add_space_prefix": _space_first(about)}


def _in_turn(merges: list[tuple[str, str]]) -> list[str]:
    """The pieces that merges make, one after the other."""
    return [piece for piece, _ in groupby(left + right for left, right in merges)]


def _space_first(about: Mapping[str, Any]) -> bool:
    """Whether SentencePiece sets a space before a text; raises for other ways to treat spaces than its own."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer, cut = _parts(about, "normalizer"), _parts(about, "pre_tokenizer")
    if not normalizer and len(cut) == 1 and cut[0]["type"] == "Metaspace" and not cut[0].get("split", True):
        return cut[0].get("prepend_scheme") != "never"
    words = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if cut not in ([], [words]):  # Gemma splits at spaces, of which its normalizer leaves none
        raise _unknown(about, "pre_tokenizer", "none, or Metaspace without split")
    if normalizer not in ([replace], [{"type": "Prepend", "prepend": "▁"}, replace]):
        raise _unknown(about, "normalizer", "spaces as '▁'")
    return len(normalizer) == 2


def _parts(about: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The steps of a part of tokenizer.json."""
    part = about.get(name) or {}
    steps = part.get("normalizers", part.get("pretokenizers", [part]))
    return [step for step in steps if step]


def _unknown(about: Mapping[str, Any], name: str, expected: str) -> ModelError:
    return ModelError(bad_argument(CALL, f"{name} of tokenizer.json", json.dumps(about.get(name)), expected))
