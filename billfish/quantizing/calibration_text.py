"""The text that a model is calibrated with, and its windows of tokens."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import DataError, complaint
from billfish.core.files import read_text
from billfish.statistics.inputs import CALL

DEFAULT_NAME = "the text that billfish carries"


def named_text(path: str | os.PathLike[str] | None) -> tuple[str, str]:
    """A text and its name; without a path, the text that the package carries."""
    if path is None:
        return default_text(), DEFAULT_NAME
    return read_text(CALL, "text", path), Path(path).name


def default_text() -> str:
    """Prose, code, lists, numbers and several languages, written for this purpose."""
    return resources.files("billfish.quantizing").joinpath("default_text.txt").read_text("utf-8")


def windows_of(tokenizer: Tokenizer, text: str, tokens: int, window: int) -> list[list[int]]:
    """The first tokens of a text in windows that know nothing of each other, each with the token that the model expects
    first. Those count as tokens, too."""
    ids = tokenizer.encode(text, special=False, start=False)
    start = [tokenizer.bos] if tokenizer.starts_with_bos and tokenizer.bos is not None else []
    step = window - len(start)
    if not ids or step < 1:
        got = "no tokens" if not ids else f"windows of {window}"
        raise DataError(complaint(CALL, "text", got, "a text, and windows that hold some of it"))
    windows = [start + ids[at : at + step] for at in range(0, len(ids), step)]
    kept: list[list[int]] = []
    for part in windows:
        left = tokens - sum(map(len, kept))
        if left <= len(start):
            break
        kept.append(part[:left])
    if not kept:
        raise DataError(complaint(CALL, "tokens", tokens, f"from {1 + len(start)} on"))
    return kept
