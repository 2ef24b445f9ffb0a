"""Text to token ids and back, with the vocabulary of a GGUF file or of a folder's tokenizer.json.

Three kinds are in use. Byte-level ("gpt2" in GGUF): text is cut by a regular expression, its bytes become printable
characters, and merges of neighbours are applied by rank. SentencePiece ("llama"): spaces become "▁", merges are those
that make known pieces, best score first, and what no piece covers is spelled in bytes. WordPiece ("bert"): lower-case
words are cut into the longest known pieces; "▁" begins those that begin a word, as in GGUF.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from billfish.core.errors import BillfishError, ModelError, failure

CALL = "llm.load"
# Kinds of tokens, GGUF's numbers.
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
WITHOUT_TOKENIZER = "Without a tokenizer the model takes and gives token ids alone."
MARK = "\ufdd0"  # a character that no text has. It keeps what is around it apart, and is not encoded itself
EncodeShort = Callable[[str, bool], list[int]]  # of a text, and of whether control tokens in it count as such
SHORT = 4096  # characters of a text; for a longer one it pays to make the library's encoder
TOKEN_COST = 500  # bytes of memory for all that is known about one token


@contextmanager
def library_errors(problem: str, fix: str = "") -> Iterator[None]:
    """What the library `tokenizers` raises becomes a ModelError. The library has no class of its own for errors, and a
    panic inside it is not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, BillfishError):
        raise
    except BaseException as error:
        raise ModelError(failure(CALL, f"{problem} ({type(error).__name__}: {error})", fix)) from None


def byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable bytes are themselves, the others take the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """Encodes and decodes. Make one with :func:`billfish.checkpoints.tokenizer.gguf_tokenizer.read_metadata` or
    :func:`billfish.checkpoints.tokenizer.tokenizer_json.read_folder`.

    pieces, kinds: of each token, as GGUF has them. roles: tokens by "bos", "eos", "unk", "pad", "eot" and "eom".
    ends: the tokens after which an answer is over.
    """

    def __init__(
        self,
        encoder: Callable[[], Any],
        pieces: Sequence[str],
        kinds: Sequence[int],
        roles: Mapping[str, int],
        *,
        byte_level: bool,
        starts_with_bos: bool,
        ends: Iterable[int] = (),
        closing: Sequence[int] = (),
        between: Sequence[int] = (),
        encode_short: EncodeShort | None = None,
    ) -> None:
        """encoder: makes a Tokenizer of the library `tokenizers`. ends: from
        :mod:`billfish.checkpoints.tokenizer.ends`. closing: what follows a text that is embedded. between: what is
        between the texts of a pair. encode_short: finds what the library finds in a text that is not long, so that
        `encoder` is called when another one comes."""
        self._make_encoder, self._encoder, self._encode_short = encoder, None, encode_short
        self.pieces, self.kinds, self.roles = pieces, kinds, dict(roles)
        self.byte_level = byte_level
        self.bos = roles.get("bos")
        self.starts_with_bos = starts_with_bos and self.bos is not None
        self.ends = frozenset(ends)
        self._closing, self._between = list(closing), list(between)
        self._bytes = byte_characters() if byte_level else {}
        self._turn = threading.RLock()  # the encoder is made once, and has one setting for all threads

    @property
    def encoder(self) -> Any:
        """A Tokenizer of the library `tokenizers`. Who has many texts asks for it before the first."""
        with self._turn:
            if self._encoder is None:
                with library_errors("the tokenizer is damaged"):
                    self._encoder = self._make_encoder()
            return self._encoder

    def check(self, call: str) -> None:
        """Raise ModelError where a model has no tokenizer. call: the name that the error begins with."""

    def encode(self, text: str, *, special: bool = True, start: bool = True) -> list[int]:
        """Token ids of `text`. special: control tokens written in the text count as such. start: begin with the
        token that models expect first, where this one does. What a `MARK` keeps apart is no control token."""
        with self._turn, library_errors("the tokenizer cannot encode the text"):
            if self._encode_short and self._encoder is None and len(text) <= SHORT and MARK not in text:
                ids = self._encode_short(text, special)
            else:
                ids = self._encode_long(text, special)
        if start and self.starts_with_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids

    def _encode_long(self, text: str, special: bool) -> list[int]:
        self.encoder.encode_special_tokens = not special
        encoded = self.encoder.encode(text, add_special_tokens=False)
        ids: list[int] = encoded.ids
        if MARK in text:
            self.encoder.encode_special_tokens = True
            ids = self._without_marks(text, ids, encoded.offsets)
        return ids

    @property
    def separator(self) -> int:
        """The token between the texts of a pair; -1: there is none."""
        return self._between[0] if self._between else -1

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of a text that is embedded, from its first token to its last. Control tokens are no part of it."""
        return self.encode(text, special=False) + self._closing

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts that are read together."""
        behind = self.encode(second, special=False, start=False)
        return self.encode(first, special=False) + self._between + behind + self._closing

    def _without_marks(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """The tokens of a text without those of its marks. offsets: the characters of each token."""
        kept = list[int]()
        for token, (start, end) in zip(ids, offsets, strict=True):
            covered = text[start:end]
            if MARK not in covered:
                kept.append(token)
            elif rest := covered.replace(MARK, ""):  # a token of a mark and its neighbours
                kept += self.encoder.encode(rest, add_special_tokens=False).ids
        return kept

    def piece_bytes(self, token: int) -> bytes:
        """What a token adds to the text; control tokens add nothing."""
        piece, kind = self.pieces[token], self.kinds[token]
        if kind == CONTROL:
            return b""
        if kind == BYTE:
            return bytes([int(piece[1:-1], 16)])  # <0x0A>
        if not self.byte_level:
            return piece.replace("▁", " ").encode()
        if kind == USER_DEFINED:
            return piece.encode()
        return b"".join(bytes([self._bytes[c]]) if c in self._bytes else c.encode() for c in piece)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens. Bytes that are no UTF-8 become U+FFFD."""
        return "".join(self.stream(tokens))

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of each token as it comes; a character that is spread over tokens comes with its last."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(self.piece_bytes(token))
        yield decoder.decode(b"", final=True)


class NoTokenizer(Tokenizer):
    """In the place of a tokenizer that a model does not have. The model works on token ids, whose text is empty. What
    needs text raises ModelError."""

    def __init__(self, problem: str, ends: Iterable[int]) -> None:
        """problem: what is missing."""
        super().__init__(lambda: None, [], [], {}, byte_level=False, starts_with_bos=False, ends=ends)
        self.problem = problem

    def check(self, call: str) -> NoReturn:
        raise ModelError(failure(call, self.problem, WITHOUT_TOKENIZER))

    def encode(self, text: str, *, special: bool = True, start: bool = True) -> list[int]:
        self.check("llm.tokenize")

    def piece_bytes(self, token: int) -> bytes:
        return b""

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        self.check("llm.detokenize")
