"""Tokenizers from the fields of a GGUF file."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from billfish.backends.cpu import _cpu
from billfish.checkpoints.tokenizer.ends import end_tokens
from billfish.checkpoints.tokenizer.gguf_extras import FLAGS, Extras, read_extras
from billfish.checkpoints.tokenizer.pre_tokenizers import CUTS, pre_tokenizer
from billfish.checkpoints.tokenizer.short_texts import short_texts
from billfish.checkpoints.tokenizer.tokenizer import (
    BYTE,
    CALL,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    EncodeShort,
    NoTokenizer,
    Tokenizer,
    library_errors,
)
from billfish.core.errors import ModelError, bad_argument, failure, readable
from billfish.core.extras import require

MAX_MERGES = 1 << 24  # characters of all merges together
NONE = ("none", "no_vocab")  # llama.cpp's words for no tokenizer
# Tokens that end an answer: of a text, a turn, a message, or of what was filled into a text.
END_FIELDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# What a token is for: our word, and GGUF's.
ROLES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "eot": "eot",
    "eom": "eom",
    "sep": "seperator",  # as GGUF spells it
    "mask": "mask",
}
BERT_ROLES = {"bos": "[CLS]", "eos": "[SEP]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]"}  # where nothing is said


def problem_of(metadata: Mapping[str, Any]) -> str:
    """Why a file has no tokenizer; "" if it has one."""
    if metadata.get("tokenizer.ggml.model") in (None, *NONE):
        return "the GGUF file has no tokenizer (tokenizer.ggml.model)"
    return ""


def check_fields(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """The kind of a file's tokenizer, and how it cuts; raises ModelError for others than ours."""
    model, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    if problem := problem_of(metadata):
        raise ModelError(failure(CALL, problem))
    if model not in ("llama", "gemma4", "bert") and (model != "gpt2" or pre not in CUTS):
        found = f"{model!r} with the pre-tokenizer {pre!r}"
        expected = f"'llama', 'gemma4', 'bert', or 'gpt2' with one of the pre-tokenizers {', '.join(CUTS)}"
        raise ModelError(bad_argument(CALL, "tokenizer.ggml.model", found, expected))
    return str(model), pre


def read_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file; raises ModelError if it is of a kind that we do not know."""
    model, pre = check_fields(metadata)
    pieces, kinds = _pieces(metadata)
    roles, extras = _roles(metadata, len(pieces)), read_extras(metadata, len(pieces))
    with_bos = model != "gpt2" or CUTS[pre].starts_with_bos
    closing, between = _frame(metadata, model, roles)
    if model != "gemma4":  # whose published files say that there is none, which is wrong
        with_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", with_bos))
    with_bos = with_bos and "bos" in roles
    with library_errors("the tokenizer of the GGUF file is damaged"):
        added = _added(metadata, pieces, kinds, extras)
        frame = _framing(pieces, roles["bos"], between, closing) if with_bos else None
        if model == "gpt2":
            make_encoder, encode_short = _byte_level(metadata, pieces, kinds, extras, added, frame)
        else:
            encoder = _whole_texts(metadata, pieces, kinds)
            encoder.add_tokens(added)
            if frame is not None:
                encoder.post_processor = frame
            make_encoder, encode_short = (lambda: encoder), None
    named, template = _named_ends(metadata, len(pieces)), metadata.get("tokenizer.chat_template")
    ends = end_tokens(pieces, kinds, named, template) if extras.ends is None else frozenset(extras.ends)
    return Tokenizer(
        make_encoder,
        pieces,
        kinds,
        roles,
        byte_level=model == "gpt2",
        starts_with_bos=with_bos,
        ends=ends,
        closing=closing,
        between=between,
        encode_short=encode_short,
    )


def _frame(metadata: Mapping[str, Any], model: str, roles: dict[str, int]) -> tuple[list[int], list[int]]:
    """What follows a text that is embedded, and what is between two."""
    role = next((role for role in ("sep", "eos") if role in roles), None)
    bert = model == "bert"
    end = [] if role is None else [roles[role]]
    closes = metadata.get("tokenizer.ggml.add_eos_token", bert)
    parts = bert or metadata.get("tokenizer.ggml.add_sep_token", False)
    last = [roles["eos"]] if closes and "eos" in roles else end if closes else []
    return last, end if parts else []


def _whole_texts(metadata: Mapping[str, Any], pieces: list[str], kinds: list[int]) -> Any:
    """A Tokenizer of the library for what is not byte-level, without the tokens that are found as they are."""
    model = metadata["tokenizer.ggml.model"]
    if model == "bert":
        return _wordpiece(pieces, kinds)
    vocabulary = _vocabulary(pieces, kinds)
    spaced = bool(metadata.get("tokenizer.ggml.add_space_prefix", model == "llama"))
    scores = metadata["tokenizer.ggml.scores"] if model == "llama" else ()
    pairs = merges_of(vocabulary, scores) if model == "llama" else _pairs(metadata["tokenizer.ggml.merges"])
    return _sentencepiece(vocabulary, pieces[0], pairs, spaced)


def _wordpiece(pieces: list[str], kinds: list[int]) -> Any:
    """Lower-case words, as llama.cpp takes for granted: GGUF has no field for it."""
    tokenizers = require("tokenizers", "llm")
    plain = [
        piece.removeprefix("▁") if piece.startswith("▁") else piece if kind == CONTROL else f"##{piece}"
        for piece, kind in zip(pieces, kinds, strict=True)
    ]
    known = {piece: i for i, piece in enumerate(plain)}
    encoder = tokenizers.Tokenizer(tokenizers.models.WordPiece(known, unk_token="[UNK]", max_input_chars_per_word=100))
    encoder.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    encoder.decoder = tokenizers.decoders.WordPiece(prefix="##")
    return encoder


def without_tokenizer(metadata: Mapping[str, Any], vocabulary: int) -> NoTokenizer:
    """In the place of the tokenizer that a file does not have. vocabulary: rows of its embedding."""
    return NoTokenizer(problem_of(metadata), _named_ends(metadata, vocabulary))


def _named_ends(metadata: Mapping[str, Any], size: int) -> list[int]:
    return [_token(metadata, name, size) for name in END_FIELDS if f"tokenizer.ggml.{name}_token_id" in metadata]


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


def _vocabulary(pieces: list[str], kinds: list[int]) -> dict[str, int]:
    """What the library looks pieces up in: without those that only fill up the embedding, which no text stands for."""
    if UNUSED not in kinds:
        return dict(zip(pieces, range(len(pieces)), strict=True))
    return {piece: i for i, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)) if not _fills(piece, kind)}


def _fills(piece: str, kind: int) -> bool:
    """Whether a piece only fills up the embedding."""
    return kind == UNUSED and piece.startswith("[PAD")


def _roles(metadata: Mapping[str, Any], size: int) -> dict[str, int]:
    named = {role: name for role, name in ROLES.items() if f"tokenizer.ggml.{name}_token_id" in metadata}
    roles = {role: _token(metadata, name, size) for role, name in named.items()}
    if metadata.get("tokenizer.ggml.model") == "bert":
        pieces = metadata["tokenizer.ggml.tokens"]
        roles = {role: pieces.index(piece) for role, piece in BERT_ROLES.items() if piece in pieces} | roles
    return roles


def _token(metadata: Mapping[str, Any], name: str, size: int) -> int:
    field = f"tokenizer.ggml.{name}_token_id"
    token = metadata[field]
    if not isinstance(token, int) or not 0 <= token < size:
        raise ModelError(bad_argument(CALL, field, repr(token), f"0 to {size - 1}"))
    return token


def _added(metadata: Mapping[str, Any], pieces: list[str], kinds: list[int], extras: Extras) -> list[Any]:
    """The tokens that are found in a text as they are, before it is cut."""
    added, flags = require("tokenizers", "llm").AddedToken, extras.flags
    if flags is None:
        flags = {"rstrip": _takes_spaces(metadata, pieces, kinds)}
    chosen = {flag: set(flags.get(flag, ())) for flag in FLAGS}
    return [
        added(pieces[i], special=kind == CONTROL, **{flag: i in tokens for flag, tokens in chosen.items()})
        for i, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _takes_spaces(metadata: Mapping[str, Any], pieces: list[str], kinds: list[int]) -> list[int]:
    """Control tokens behind which spaces count for nothing: those of Phi 3's chats, as in llama.cpp."""
    if (metadata.get("general.architecture"), metadata.get("tokenizer.ggml.model")) != ("phi3", "llama"):
        return []
    others = ("<unk>", "<s>", "<|endoftext|>")
    return [i for i, kind in enumerate(kinds) if kind == CONTROL and pieces[i] not in others]


def _byte_level(
    metadata: Mapping[str, Any],
    pieces: list[str],
    kinds: list[int],
    extras: Extras,
    added: list[Any],
    frame: Any,
) -> tuple[Callable[[], Any], EncodeShort | None]:
    """What makes a Tokenizer of the library, and what encodes short texts as it does. Neither reads `metadata` later:
    somebody may overwrite the file. frame: from `_framing`, or None."""
    tokenizers, (_, pre) = require("tokenizers", "llm"), check_fields(metadata)
    cut = CUTS[pre]
    ignore = cut.ignore_merges if extras.ignore_merges is None else bool(extras.ignore_merges)

    def make(bpe: Any) -> Any:
        encoder = tokenizers.Tokenizer(bpe)
        if cut.nfc if extras.nfc is None else extras.nfc:
            encoder.normalizer = tokenizers.normalizers.NFC()
        encoder.pre_tokenizer = pre_tokenizer(pre)
        encoder.decoder = tokenizers.decoders.ByteLevel()
        encoder.add_tokens(added)
        return encoder

    def make_whole() -> Any:
        encoder = make(tokenizers.models.BPE(_vocabulary(pieces, kinds), pairs.merges(), ignore_merges=ignore))
        if frame is not None:
            encoder.post_processor = frame
        return encoder

    def make_cutter(vocabulary: dict[str, int]) -> Any:
        return make(tokenizers.models.BPE(vocabulary, []))

    texts: list[str | None] = [*pieces]
    if UNUSED in kinds:
        texts = [None if _fills(*both) else both[0] for both in zip(pieces, kinds, strict=True)]
    pairs = _cpu.BytePairs(texts, metadata["tokenizer.ggml.merges"], ignore)
    return make_whole, short_texts(pairs, [token.content for token in added], make_cutter)


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    """Merges as the library has them. A piece may begin with a space."""
    cuts = [merge.index(" ", 1) for merge in merges]
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _sentencepiece(vocabulary: dict[str, int], first: str, pairs: list[tuple[str, str]], space_first: bool) -> Any:
    tokenizers = require("tokenizers", "llm")
    normalizers, steps = tokenizers.normalizers, tokenizers.decoders
    unknown = first if "<unk>" not in vocabulary else "<unk>"
    model = tokenizers.models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    encoder = tokenizers.Tokenizer(model)
    before = [normalizers.Prepend("▁")] if space_first else []
    encoder.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [steps.Strip(" ", 1, 0)] if space_first else []
    encoder.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), *after])
    return encoder


def merges_of(vocabulary: dict[str, int], scores: Any) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, those of the best score first: SentencePiece's merges.

    vocabulary: tokens by their pieces. scores: of tokens. Work and memory are linear in the length of all pieces, and
    in that of all pairs.
    """
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
    pieces = {i: piece for piece, i in vocabulary.items()}
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


def _framing(pieces: list[str], bos: int, between: list[int], closing: list[int]) -> Any:
    """What others than us, who encode with `add_special_tokens`, find around a text, and around two."""
    first, separators, last = pieces[bos], [pieces[i] for i in between], [pieces[i] for i in closing]
    again = separators or [first]  # a decoder's texts begin each as one does alone
    return require("tokenizers", "llm").processors.TemplateProcessing(
        single=" ".join([first, "$A", *last]),
        pair=" ".join([first, "$A", *again, "$B:1" if separators else "$B", *(f"{name}:1" for name in last)]),
        special_tokens=[(pieces[i], i) for i in dict.fromkeys([bos, *between, *closing])],
    )
