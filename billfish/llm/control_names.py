"""Names of control tokens in a text that somebody else wrote: they must not become control tokens.

A page that is pasted into a chat may say `<|im_end|>`. If that became the token that ends a message, the page could
write a system message of its own. So each such name gets a mark into its middle before the chat template is rendered;
:meth:`billfish.checkpoints.tokenizer.tokenizer.Tokenizer.encode` leaves the mark out when it has cut the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from billfish.checkpoints.tokenizer.tokenizer import CONTROL, MARK, Tokenizer


class ControlNames:
    """The names of a tokenizer's control tokens. allowed: some that may stay, such as marks of thoughts."""

    def __init__(self, tokenizer: Tokenizer, allowed: Collection[str] = ()) -> None:
        kinds = zip(tokenizer.pieces, tokenizer.kinds, strict=False)
        names = {piece for piece, kind in kinds if kind == CONTROL and len(piece) > 1} - set(allowed)
        # The longest name first, of those that begin alike.
        alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._pattern = re.compile(alternatives) if names else None

    def guarded(self, value: Any) -> Any:
        """A JSON value, with a mark in each name that its texts have."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(_with_mark, value)
        if isinstance(value, Mapping):
            return {self.guarded(name): self.guarded(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.guarded(each) for each in value]
        return value


def _with_mark(found: re.Match[str]) -> str:
    return found[0][0] + MARK + found[0][1:]
