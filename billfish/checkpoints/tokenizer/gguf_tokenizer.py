"""Tokenizers from the fields of a GGUF file."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any

from billfish.checkpoints.tokenizer.pre_tokenizers import CUTS, pre_tokenizer
from billfish.checkpoints.tokenizer.tokenizer import (
    BYTE,
    CALL,
    CONTROL,
    NORMAL,
    USER_DEFINED,
    Tokenizer,
    library_errors,
)
from billfish.core.errors import ModelError, bad_argument, failure, readable
from billfish.core.extras import require

MAX_MERGES = 1 << 24  # characters of all merges together
# What a token is for: our word, and GGUF's.
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}


def check_fields(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """The kind of a file's tokenizer, and how it cuts; raises ModelError for others than ours."""
    model, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    if model != "llama" and (model != "gpt2" or pre not in CUTS):
        if model is None:
            raise ModelError(failure(CALL, "the GGUF file has no tokenizer (tokenizer.ggml.model)"))
        found = f"{model!r} with the pre-tokenizer {pre!r}"
        expected = f"'llama', or 'gpt2' with one of the pre-tokenizers {', '.join(CUTS)}"
        raise ModelError(bad_argument(CALL, "tokenizer.ggml.model", found, expected))
    return model, pre


def read_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file; raises ModelError if it is of a kind that we do not know."""
    model, pre = check_fields(metadata)
    pieces, kinds = _pieces(metadata)
    roles = _roles(metadata, len(pieces))
    with_bos = model == "llama" or pre in ("llama-bpe", "llama3", "tekken")
    with_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", with_bos)) and "bos" in roles
    with library_errors("the tokenizer of the GGUF file is damaged"):
        if model == "gpt2":
            encoder = _byte_level(pieces, metadata["tokenizer.ggml.merges"], pre)
        else:
            space_first = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
            encoder = _sentencepiece(pieces, metadata["tokenizer.ggml.scores"], space_first)
        added = require("tokenizers", "llm").AddedToken
        whole = [i for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
        encoder.add_tokens([added(pieces[i], special=kinds[i] == CONTROL, normalized=False) for i in whole])
        if with_bos:
            _start_with(encoder, pieces[roles["bos"]], roles["bos"])
    return Tokenizer(encoder, pieces, kinds, roles, byte_level=model == "gpt2", starts_with_bos=with_bos)


def _pieces(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """The vocabulary, and the kind of each of its pieces."""
    pieces = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(pieces, list) or not set(map(type, pieces)) <= {str}:
        found = "a list of other types" if isinstance(pieces, list) else repr(pieces)
        raise ModelError(bad_argument(CALL, "tokenizer.ggml.tokens", found, "a list of strings, the vocabulary"))
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(pieces))
    if not isinstance(kinds, list) or len(kinds) != len(pieces):
        raise ModelError(failure(CALL, f"tokenizer.ggml.token_type is not a list of {len(pieces)} numbers"))
    if BYTE in kinds:  # of byte-level BPE, none
        spelled = (piece for piece, kind in zip(pieces, kinds, strict=True) if kind == BYTE)
        odd = next((piece for piece in spelled if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece)), None)
        if odd is not None:
            raise ModelError(failure(CALL, f"tokenizer.ggml.tokens has the byte {odd!r}", "Expected '<0x0A>'."))
    return pieces, kinds


def _roles(metadata: Mapping[str, Any], size: int) -> dict[str, int]:
    roles = {}
    for role, name in ROLES.items():
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and (not isinstance(token, int) or not 0 <= token < size):
            expected = f"0 to {size - 1}"
            raise ModelError(bad_argument(CALL, f"tokenizer.ggml.{name}_token_id", repr(token), expected))
        if token is not None:
            roles[role] = token
    return roles


def _byte_level(pieces: list[str], merges: list[str], cut: str) -> Any:
    tokenizers = require("tokenizers", "llm")
    vocabulary = dict(zip(pieces, range(len(pieces)), strict=True))
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 and Qwen have pieces that no merges lead to: a word that is one is taken whole.
    model = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=CUTS[cut][1] is not None)
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = pre_tokenizer(cut)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    return encoder


def _sentencepiece(pieces: list[str], scores: Any, space_first: bool) -> Any:
    tokenizers = require("tokenizers", "llm")
    normalizers, steps = tokenizers.normalizers, tokenizers.decoders
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    unknown = pieces[0] if "<unk>" not in vocabulary else "<unk>"
    pairs = merges_of(pieces, scores)
    model = tokenizers.models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    encoder = tokenizers.Tokenizer(model)
    before = [normalizers.Prepend("▁")] if space_first else []
    encoder.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [steps.Strip(" ", 1, 0)] if space_first else []
    encoder.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), *after])
    return encoder


def merges_of(pieces: list[str], scores: Any) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, those of the best score first: SentencePiece's merges.

    Work and memory are linear in the length of all pieces, and in that of all pairs.
    """
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    beginnings = _lengths_inside(vocabulary)
    backwards = _lengths_inside({piece[::-1]: i for piece, i in vocabulary.items()})
    ranked, size = [], 0
    for piece, i in vocabulary.items():
        endings = set(backwards[i])
        for cut in beginnings[i]:
            if len(piece) - cut in endings:
                ranked.append((-float(scores[i]), i, vocabulary[piece[:cut]], vocabulary[piece[cut:]]))
                size += len(piece)
        if size > MAX_MERGES:
            raise ValueError(f"tokens that merge in too many ways, such as {readable(piece)!r}")
    ranked.sort()
    return [(pieces[left], pieces[right]) for _, _, left, right in ranked]


def _lengths_inside(vocabulary: dict[str, int]) -> dict[int, array[int]]:
    """For each piece, the lengths of the other pieces that it begins with. In the order of the alphabet a piece comes
    behind all that it begins with, and `around` holds them."""
    lengths: dict[int, array[int]] = {}
    around: list[str] = []
    for piece in sorted(vocabulary):
        while around and not piece.startswith(around[-1]):
            around.pop()
        lengths[vocabulary[piece]] = array("I", (len(other) for other in around if other))
        around.append(piece)
    return lengths


def _start_with(encoder: Any, piece: str, token: int) -> None:
    """What others than us, who encode with `add_special_tokens`, find before a text."""
    processors = require("tokenizers", "llm").processors
    encoder.post_processor = processors.TemplateProcessing(
        single=f"{piece} $A", pair=f"{piece} $A {piece} $B", special_tokens=[(piece, token)]
    )
