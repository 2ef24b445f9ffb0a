"""Tokenizers and chat templates from a model's folder: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from billfish.checkpoints.tokenizer.ends import end_tokens
from billfish.checkpoints.tokenizer.tokenizer import (
    BYTE,
    CALL,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    NoTokenizer,
    Tokenizer,
    library_errors,
)
from billfish.core.errors import ModelError, bad_argument, failure
from billfish.core.extras import require
from billfish.core.files import read_json, read_whole

MAX_GAP = 10_000  # numbers of tokens that neither a piece nor a row of the embedding has
ROLES = ("bos", "eos", "unk", "pad")
MAKE_ONE = "Make one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."


def problem_of(folder: Path) -> str:
    """Why a folder has no tokenizer; "" if it has one."""
    if (folder / "tokenizer.json").is_file():
        return ""
    others = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
    return f"{folder} has no tokenizer.json{f', only {others[0]}' if others else ''}"


def without_tokenizer(folder: Path, vocabulary: int) -> NoTokenizer:
    """In the place of the tokenizer that a folder does not have. vocabulary: rows of its embedding."""
    return NoTokenizer(f"{problem_of(folder)}. {MAKE_ONE}", _named_ends(folder, vocabulary))


def read_folder(folder: Path, vocabulary: int) -> Tokenizer:
    """The tokenizer of a folder; raises ModelError if there is none, or of a kind that we do not know.

    vocabulary: rows of the embedding. Those that no token uses get names such as "[PAD7]".
    """
    if problem := problem_of(folder):
        raise ModelError(failure(CALL, problem, MAKE_ONE))
    encoder = _encoder(folder / "tokenizer.json")
    kind = _kind(encoder, folder)
    byte_level = kind == "byte level"
    known: dict[str, int] = encoder.get_vocab(with_added_tokens=True)
    size = max([vocabulary, *(token + 1 for token in known.values())])
    if size > max(vocabulary, len(known)) + MAX_GAP:
        file = folder / "tokenizer.json"
        raise ModelError(failure(CALL, f"{file} has the token {size - 1}, and the embedding has {vocabulary} rows"))
    pieces, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for piece, token in known.items():
        spelled = not byte_level and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece)
        pieces[token], kinds[token] = piece, BYTE if spelled else NORMAL
    for token, added in encoder.get_added_tokens_decoder().items():
        kinds[token] = CONTROL if added.special else USER_DEFINED
        if not added.special and kind == "sentencepiece":
            pieces[token] = pieces[token].replace("▁", " ")  # GGUF has the text that such a token stands for
    if kind == "wordpiece":
        pieces = [marked(piece) if use == NORMAL else piece for piece, use in zip(pieces, kinds, strict=True)]
    about = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    roles = _roles(about, _config(folder), known, size)
    named = [*_named_ends(folder, size), *(token for role, token in roles.items() if role == "eos")]
    ends = end_tokens(pieces, kinds, named, chat_template(folder))
    opening, between, closing = _frame(encoder, folder)
    if len(opening) == 1 and closing:  # an encoder's: [CLS] text [SEP]
        roles["bos"], roles["sep"] = opening[0], (between or closing)[-1]
        roles.setdefault("eos", closing[-1])
    starts = about.get("add_bos_token")
    if not isinstance(starts, bool) or closing:
        starts = opening[:1] == [roles.get("bos")]
    return Tokenizer(
        lambda: encoder,
        pieces,
        kinds,
        roles,
        byte_level=byte_level,
        starts_with_bos=starts,
        ends=ends,
        closing=closing,
        between=between,
    )


def _frame(encoder: Any, folder: Path) -> tuple[list[int], list[int], list[int]]:
    """The tokens before a text, between two, and behind the last."""
    with library_errors(f"{folder / 'tokenizer.json'} cannot encode text"):
        empty: list[int] = encoder.encode("", add_special_tokens=True).ids
        if not empty:
            return [], [], []
        text = next((each for each in ("a", "A", "the", "0") if encoder.encode(each, add_special_tokens=False).ids), "")
        plain: list[int] = encoder.encode(text, add_special_tokens=False).ids
        framed: list[int] = encoder.encode(text, add_special_tokens=True).ids
        pair: list[int] = encoder.encode(text, text, add_special_tokens=True).ids
    if not plain:
        return empty, [], []
    count = len(plain)
    at = next((i for i in range(len(framed)) if framed[i : i + count] == plain), 0)
    second = next((i for i in range(len(pair) - count, at + count - 1, -1) if pair[i : i + count] == plain), at + count)
    return framed[:at], pair[at + count : second], framed[at + count :]


def marked(piece: str) -> str:
    """A piece of WordPiece as GGUF has it: "▁" before those that begin a word, and no "##" before the others."""
    return piece[2:] if piece.startswith("##") else f"▁{piece}"


def _config(folder: Path) -> Mapping[str, Any]:
    """Of the language model, in folders of models that take images, too."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    whole = {name: value for name, value in config.items() if value is not None}
    return {**text, **whole} if isinstance(text, dict) else config


def _named_ends(folder: Path, size: int) -> list[int]:
    """The end tokens that config.json and generation_config.json name."""
    files = (_config(folder), read_json(folder / "generation_config.json"))
    return [token for settings in files for token in _tokens(settings.get("eos_token_id"), size)]


def _encoder(path: Path) -> Any:
    library = require("tokenizers", "llm")
    with library_errors(f"the library tokenizers cannot read {path}"):
        encoder = library.Tokenizer.from_buffer(read_whole(path))
        encoder.no_truncation()
        encoder.no_padding()
    return encoder


def _kind(encoder: Any, folder: Path) -> Literal["byte level", "sentencepiece", "wordpiece"]:
    """Whether pieces are bytes in disguise, SentencePiece's or WordPiece's, as the way back to text tells."""
    state = {} if encoder.decoder is None else json.loads(encoder.decoder.__getstate__())
    kinds = [str(part.get("type", "none")) for part in state.get("decoders", [state])]
    if "ByteLevel" in kinds:
        return "byte level"
    if "WordPiece" in kinds:
        return "wordpiece"
    if "ByteFallback" not in kinds and "Metaspace" not in kinds:
        expected = "ByteLevel, WordPiece, or ByteFallback and Metaspace, as in SentencePiece"
        raise ModelError(bad_argument(CALL, f"decoder of {folder / 'tokenizer.json'}", ", ".join(kinds), expected))
    return "sentencepiece"


def _roles(about: Mapping[str, Any], config: Mapping[str, Any], known: Mapping[str, int], size: int) -> dict[str, int]:
    """Tokens by what they are for: the tokenizer's files name pieces, config.json numbers."""
    roles = {}
    for role in ROLES:
        piece = about.get(f"{role}_token")
        piece = piece.get("content") if isinstance(piece, dict) else piece
        tokens = [known[piece]] if isinstance(piece, str) and piece in known else []
        tokens += _tokens(config.get(f"{role}_token_id"), size)
        if tokens:
            roles[role] = tokens[0]
    return roles


def _tokens(named: Any, size: int) -> list[int]:
    """One token or several, where there are so many."""
    tokens = named if isinstance(named, list) else [named]
    return [token for token in tokens if isinstance(token, int) and 0 <= token < size]


def chat_template(folder: Path) -> str | None:
    """The chat template of a folder, if it has one; of several that have names, the one called "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return read_whole(file).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(failure(CALL, f"cannot read {file}: {error}", "Expected a UTF-8 text.")) from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, list):
            named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
            template = named.get("default")
        if template is not None:
            return template
    return None
