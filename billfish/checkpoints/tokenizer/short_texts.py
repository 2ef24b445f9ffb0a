"""Byte-level encoding of short texts, which is ready sooner than the library's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from billfish.backends.cpu import _cpu
from billfish.checkpoints.tokenizer.tokenizer import EncodeShort, byte_characters


def short_texts(
    pairs: _cpu.BytePairs, added: Iterable[str], make_cutter: Callable[[dict[str, int]], Any]
) -> EncodeShort | None:
    """What finds the tokens that the library `tokenizers` finds. None where a token that is found as it is could be
    taken for a byte.

    Python takes longer to make the library's BPE of a large vocabulary than to load a small model. Here the library
    cuts a text into words, with a vocabulary of bytes, and native code merges the bytes of each word.

    pairs: of the whole vocabulary. added: tokens that are found as they are. make_cutter: makes a Tokenizer of the
    library of a vocabulary, without merges.
    """
    characters, contents = byte_characters(), list(dict.fromkeys(added))
    vocabulary = {piece: i for i, piece in enumerate([*characters, *contents])}
    if len(vocabulary) < len(characters) + len(contents):
        return None
    cutter, known = make_cutter(vocabulary), {vocabulary[piece]: pairs.token(piece) for piece in contents}

    def encode(text: str, special: bool) -> list[int]:
        cutter.encode_special_tokens = not special
        cut = cutter.encode(text, add_special_tokens=False)
        tokens = list[int]()
        for _, word in groupby(zip(cut.word_ids, cut.ids, cut.tokens, strict=True), itemgetter(0)):
            _, ids, spelled = zip(*word, strict=True)
            whole = known.get(ids[0])
            tokens += pairs.encode("".join(spelled)) if whole is None else [whole]
        return tokens

    return encode
