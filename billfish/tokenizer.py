"""Text to token ids and back, from the vocabulary inside a GGUF file.

Two kinds are in use. "gpt2": text is cut by a regular expression, its bytes become printable characters, and merges of
neighbours are applied by rank. "llama" (SentencePiece): spaces become "▁", merges are those that make known pieces,
best score first, and what no piece covers is spelled in bytes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from billfish.errors import ModelError, complaint
from billfish.extras import require

CALL = "llm.load"
# Kinds of tokens, GGUF's numbers.
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How `tokenizer.ggml.pre` cuts text before merges: digits alone or not, then a pattern, None being GPT-2's own.
CUTS: dict[str, tuple[bool, str | None]] = {
    "gpt-2": (False, None),
    "default": (False, None),
    "smollm": (True, None),
    "starcoder": (True, None),
    "llama-bpe": (False, _LLAMA3 % r"\p{N}{1,3}"),
    "llama3": (False, _LLAMA3 % r"\p{N}{1,3}"),
    "qwen2": (False, _LLAMA3 % r"\p{N}"),
}
# Names of tokens that end an answer, beside those that the metadata names.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>", "<|end|>")


def byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable bytes are themselves, the others take the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """Encodes and decodes. `ends` are the ids after which an answer is over."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.model = metadata.get("tokenizer.ggml.model")
        pre = str(metadata.get("tokenizer.ggml.pre", "default"))
        if self.model != "llama" and (self.model != "gpt2" or pre not in CUTS):
            got = f"{self.model!r} cut as {pre!r}"
            takes = f"'llama', or 'gpt2' cut as {', '.join(CUTS)}"
            raise ModelError(complaint(CALL, "tokenizer.ggml.model", got, takes))
        self.pieces, self.kinds = _pieces(metadata)
        self._bytes = byte_characters() if self.model == "gpt2" else {}
        self._space_first = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        added = require("tokenizers", "llm").AddedToken
        try:
            if self.model == "gpt2":
                self._encoder = _gpt2(self.pieces, metadata["tokenizer.ggml.merges"], *CUTS[pre])
            else:
                self._encoder = _sentencepiece(self.pieces, metadata["tokenizer.ggml.scores"], self._space_first)
        except Exception as error:  # the library has no class of its own for merges that do not fit the vocabulary
            got = f"a vocabulary that does not fit together ({type(error).__name__}: {error})"
            raise ModelError(complaint(CALL, "tokenizer.ggml", got, "a whole file")) from None
        whole = [i for i, kind in enumerate(self.kinds) if kind in (CONTROL, USER_DEFINED)]
        self._encoder.add_tokens(
            [added(self.pieces[i], special=self.kinds[i] == CONTROL, normalized=False) for i in whole]
        )
        with_bos = self.model == "llama" or pre in ("llama-bpe", "llama3")
        self.bos = self.named(metadata, "bos")
        self.starts_with_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", with_bos)) and self.bos is not None
        self.ends = {end for name in ("eos", "eot", "eom") if (end := self.named(metadata, name)) is not None}
        self.ends |= {i for i in whole if self.kinds[i] == CONTROL and self.pieces[i] in ENDS}

    def named(self, metadata: Mapping[str, Any], name: str) -> int | None:
        """The token that the metadata give a role, such as "bos"."""
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and (not isinstance(token, int) or not 0 <= token < len(self.pieces)):
            takes = f"a token from 0 to {len(self.pieces) - 1}"
            raise ModelError(complaint(CALL, f"tokenizer.ggml.{name}_token_id", repr(token), takes))
        return token

    def encode(self, text: str, *, special: bool = True, start: bool = True) -> list[int]:
        """Token ids of `text`. special: control tokens written in the text count as such. start: begin with the
        token that models expect first, where this one does."""
        self._encoder.encode_special_tokens = not special
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        if start and self.starts_with_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids

    def piece_bytes(self, token: int) -> bytes:
        """What a token adds to the text; control tokens add nothing."""
        piece, kind = self.pieces[token], self.kinds[token]
        if kind == CONTROL:
            return b""
        if kind == BYTE:
            return bytes([int(piece[1:-1], 16)])  # <0x0A>
        if kind == USER_DEFINED:
            return piece.encode()
        if self.model == "llama":
            return piece.replace("▁", " ").encode()
        return b"".join(bytes([self._bytes[c]]) if c in self._bytes else c.encode() for c in piece)

    def to_json(self) -> str:
        """What the `tokenizers` library keeps in a tokenizer.json: this one, with its way back from tokens to text."""
        tokenizers = require("tokenizers", "llm")
        encoder = tokenizers.Tokenizer.from_str(self._encoder.to_str())
        if self.model == "gpt2":
            encoder.decoder = tokenizers.decoders.ByteLevel()
        else:
            steps = tokenizers.decoders
            first = [steps.Strip(" ", 1, 0)] if self._space_first else []
            encoder.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), *first])
        if self.starts_with_bos and self.bos is not None:
            start = self.pieces[self.bos]
            encoder.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, self.bos)]
            )
        return str(encoder.to_str(pretty=True))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens. Bytes that are no UTF-8 become U+FFFD."""
        return "".join(self.stream(tokens))

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of each token as it comes; a character that is spread over tokens comes with its last."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(self.piece_bytes(token))
        yield decoder.decode(b"", final=True)


def _pieces(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """The vocabulary, and the kind of each of its pieces."""
    pieces = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(pieces, list):
        raise ModelError(complaint(CALL, "tokenizer.ggml.tokens", repr(pieces), "a vocabulary"))
    kinds = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(pieces))
    if not isinstance(kinds, list) or len(kinds) != len(pieces):
        raise ModelError(complaint(CALL, "tokenizer.ggml.token_type", "no list as long as that of tokens", "one"))
    if BYTE in kinds:  # of byte-level BPE, none
        spelled = (piece for piece, kind in zip(pieces, kinds, strict=True) if kind == BYTE)
        odd = next((piece for piece in spelled if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece)), None)
        if odd is not None:
            raise ModelError(complaint(CALL, "tokenizer.ggml.tokens", f"{odd!r} for a byte", "such as '<0x0A>'"))
    return pieces, kinds


def _gpt2(pieces: list[str], merges: list[str], digits_alone: bool, pattern: str | None) -> Any:
    tokenizers = require("tokenizers", "llm")
    parts = tokenizers.pre_tokenizers
    vocabulary = dict(zip(pieces, range(len(pieces)), strict=True))
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 and Qwen have pieces that no merges lead to: a word that is one is taken whole.
    model = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pattern is not None)
    encoder = tokenizers.Tokenizer(model)
    cuts = [parts.Digits(individual_digits=True)] if digits_alone else []
    if pattern is not None:
        cuts.append(parts.Split(tokenizers.Regex(pattern), behavior="isolated"))
    cuts.append(parts.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    encoder.pre_tokenizer = parts.Sequence(cuts)
    return encoder


def _sentencepiece(pieces: list[str], scores: Any, space_first: bool) -> Any:
    tokenizers = require("tokenizers", "llm")
    normalizers = tokenizers.normalizers
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    ranked = []
    for piece, i in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-float(scores[i]), i, vocabulary[left], vocabulary[right]))
    ranked.sort()
    pairs = [(pieces[left], pieces[right]) for _, _, left, right in ranked]
    unknown = pieces[0] if "<unk>" not in vocabulary else "<unk>"
    model = tokenizers.models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    encoder = tokenizers.Tokenizer(model)
    steps = [normalizers.Prepend("▁")] if space_first else []
    encoder.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    return encoder
