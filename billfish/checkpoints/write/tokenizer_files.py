"""Tokenizers between GGUF's fields and the files that transformers and mlx-lm look for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from billfish.checkpoints.tokenizer.ends import TEXT_ENDS, TURN_ENDS
from billfish.checkpoints.tokenizer.gguf_extras import FIELD, FLAGS, Extras
from billfish.checkpoints.tokenizer.gguf_tokenizer import NONE, ROLES, merges_of, read_metadata
from billfish.checkpoints.tokenizer.pre_tokenizers import cut_of
from billfish.checkpoints.tokenizer.tokenizer import NORMAL, UNUSED, Tokenizer
from billfish.checkpoints.tokenizer.tokenizer_json import chat_template, read_folder, without_tokenizer
from billfish.checkpoints.write.target import json_bytes
from billfish.core.errors import ModelError, bad_argument, failure

CALL = "convert"
KNOWN_ENDS = {*TEXT_ENDS, *TURN_ENDS}  # by their text
FILE_ROLES = ("bos", "eos", "unk", "pad")  # those that tokenizer_config.json has a place for


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, and generation_config.json with all end tokens. Raises ModelError for a
    kind of tokenizer that we do not know."""
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
    named = {f"{role}_token_id": roles[role] for role in ("bos", "pad") if role in roles}
    generation = named | {"eos_token_id": sorted(tokenizer.ends)}
    return {
        "tokenizer.json": whole.encode(),
        "tokenizer_config.json": json_bytes(config),
        "generation_config.json": json_bytes(generation),
    }


def tokenizer_fields(folder: Path, vocabulary: int, architecture: str = "") -> dict[str, Any]:
    """GGUF's fields for the tokenizer of a folder, whose embedding has `vocabulary` rows. Raises ModelError for a
    tokenizer that GGUF has no words for: with one that is nearly right, a model would be nearly right.

    architecture: GGUF's name of it, for what llama.cpp does for some of them alone.
    """
    tokenizer = read_folder(folder, vocabulary)
    if len(tokenizer.pieces) > vocabulary:
        problem = f"tokenizer.json has {len(tokenizer.pieces)} tokens, and the embedding has {vocabulary} rows"
        raise ModelError(failure(CALL, problem))
    about = json.loads(tokenizer.encoder.to_str())
    kind = about["model"].get("type")
    if kind not in ("BPE", "WordPiece"):
        raise ModelError(bad_argument(CALL, "model type of tokenizer.json", kind, "BPE or WordPiece"))
    own = {"tokens": list(tokenizer.pieces), "token_type": list(tokenizer.kinds)}
    if kind == "WordPiece":
        _check_wordpiece(about)
        own |= {"model": "bert"}
    elif tokenizer.byte_level:
        own |= _byte_level(tokenizer, about, architecture)
    else:
        own |= (_merged if architecture == "gemma4" else _sentencepiece)(tokenizer, about)
    own |= {f"{ROLES[role]}_token_id": token for role, token in tokenizer.roles.items()}
    known = (tokenizer.roles.get("eos"), *(i for i, piece in enumerate(tokenizer.pieces) if piece in KNOWN_ENDS))
    others = sorted(tokenizer.ends.difference(known))
    own |= {f"{role}_token_id": end for role, end in zip(("eot", "eom"), others, strict=False)}
    own["add_bos_token"] = tokenizer.starts_with_bos
    if tokenizer.separator >= 0:  # an encoder's
        own |= {"add_eos_token": True, "add_sep_token": True}
    template = chat_template(folder)
    fields = {f"tokenizer.ggml.{name}": value for name, value in own.items()}
    fields |= {} if template is None else {"tokenizer.chat_template": template}
    extras = _extras(tokenizer, read_metadata({"general.architecture": architecture, **fields})).text()
    return fields | ({FIELD: extras} if extras else {})


def fields_without_tokenizer(folder: Path, vocabulary: int) -> dict[str, Any]:
    """GGUF's fields for a folder that has no tokenizer: llama.cpp takes such a file for token ids alone."""
    ends = sorted(without_tokenizer(folder, vocabulary).ends)
    named = {f"tokenizer.ggml.{role}_token_id": end for role, end in zip(("eos", "eot", "eom"), ends, strict=False)}
    return {"tokenizer.ggml.model": NONE[0], **named}


def _extras(tokenizer: Tokenizer, read_back: Tokenizer) -> Extras:
    """What a tokenizer has otherwise than the one that is read from its fields."""
    ignores, nfc, flags = _ignores_merges(tokenizer), _is_nfc(tokenizer), _flags(tokenizer)
    return Extras(
        ignore_merges=None if ignores == _ignores_merges(read_back) else ignores,
        nfc=None if nfc == _is_nfc(read_back) else nfc,
        flags=None if flags == _flags(read_back) else flags,
        ends=None if tokenizer.ends == read_back.ends else sorted(tokenizer.ends),
    )


def _ignores_merges(tokenizer: Tokenizer) -> bool:
    return bool(getattr(tokenizer.encoder.model, "ignore_merges", False))


def _is_nfc(tokenizer: Tokenizer) -> bool:
    return '"NFC"' in json.dumps(_parts(json.loads(tokenizer.encoder.to_str()), "normalizer"))


def _flags(tokenizer: Tokenizer) -> dict[str, list[int]]:
    added = sorted(tokenizer.encoder.get_added_tokens_decoder().items())
    return {flag: [token for token, about in added if getattr(about, flag)] for flag in FLAGS}


def _byte_level(tokenizer: Tokenizer, about: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    if _parts(about, "normalizer") not in ([], [{"type": "NFC"}]):
        raise _unknown(about, "normalizer", "none, or NFC")
    ignores = bool(about["model"].get("ignore_merges"))
    pre = cut_of(tokenizer.encoder.pre_tokenizer, ignore_merges=ignores, architecture=architecture)
    return {"model": "gpt2", "pre": pre, "merges": _joined(about)}


def _check_wordpiece(about: Mapping[str, Any]) -> None:
    """Raises for what GGUF's readers take otherwise: words are lower-case, without accents, cut as BERT does."""
    [normalizer] = _parts(about, "normalizer") or [{}]
    usual = normalizer.get("type") == "BertNormalizer" and normalizer.get("lowercase", True)
    if not usual or normalizer.get("strip_accents") is False:
        raise _unknown(about, "normalizer", "BertNormalizer with lowercase, because GGUF has no field for others")
    model = about["model"]
    if model.get("continuing_subword_prefix", "##") != "##" or _parts(about, "pre_tokenizer") != [
        {"type": "BertPreTokenizer"}
    ]:
        raise _unknown(about, "pre_tokenizer", "BertPreTokenizer, and '##' before what goes on")


def _joined(about: Mapping[str, Any]) -> list[str]:
    return [" ".join(pair) for pair in about["model"]["merges"]]


def _merged(tokenizer: Tokenizer, about: Mapping[str, Any]) -> dict[str, Any]:
    """SentencePiece's pieces with merges instead of scores: what llama.cpp calls "gemma4"."""
    _check_fallback(about)
    pieces = list(tokenizer.pieces)  # which have spaces in some, where tokenizer.json and its merges have "▁"
    for piece, token in about["model"]["vocab"].items():
        pieces[token] = piece
    for added in about["added_tokens"]:
        pieces[added["id"]] = added["content"]
    spaced = _space_first(about)
    return {"model": "gemma4", "tokens": pieces, "merges": _joined(about), "add_space_prefix": spaced}


def _check_fallback(about: Mapping[str, Any]) -> None:
    if not about["model"].get("byte_fallback"):
        raise ModelError(failure(CALL, "tokenizer.json has neither byte-level BPE nor byte_fallback"))


def _sentencepiece(tokenizer: Tokenizer, about: Mapping[str, Any]) -> dict[str, Any]:
    """Scores instead of merges: the earlier a merge, the better the piece that it makes. The scores must lead back to
    the same merges."""
    model = about["model"]
    _check_fallback(about)
    normal, pieces = set[str](), list(tokenizer.pieces)
    for piece, token in model["vocab"].items():
        pieces[token] = piece  # with "▁", where GGUF has a space in some
        if tokenizer.kinds[token] == NORMAL:
            normal.add(piece)
    made = [pair[0] + pair[1] for pair in model["merges"]]
    ranks = {piece: rank for rank, piece in enumerate(dict.fromkeys(made))}
    scores = [-float(ranks.get(piece, len(ranks))) for piece in pieces]
    used = {piece: token for token, piece in enumerate(pieces) if tokenizer.kinds[token] != UNUSED}
    theirs, ours = (
        [(left, right) for left, right in merges if left + right in normal]  # the others are found as they are
        for merges in (model["merges"], merges_of(used, scores))
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
