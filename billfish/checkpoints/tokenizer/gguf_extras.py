"""What GGUF has no words for: settings of a tokenizer that its fields and names do not tell, in a field of our own.

llama.cpp ignores the field. Files without it get what their names and fields say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from billfish.checkpoints.tokenizer.tokenizer import CALL
from billfish.core.errors import ModelError, failure

FIELD = "billfish.tokenizer"
# What the library `tokenizers` knows of added tokens: whether a token takes spaces before or behind it, is a whole word
# only, or is looked for in normalized text.
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True)
class Extras:
    """Settings of a tokenizer; None for what the other fields tell."""

    ignore_merges: bool | None = None
    nfc: bool | None = None
    flags: Mapping[str, list[int]] | None = None  # tokens by FLAGS
    ends: list[int] | None = None

    def text(self) -> str:
        """As JSON; "" if there is nothing to say."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(said) if said else ""


def read_extras(metadata: Mapping[str, Any], size: int) -> Extras:
    """Those of a GGUF file with `size` tokens. Raises ModelError for a field that is damaged."""
    try:
        said = json.loads(metadata.get(FIELD, "{}"))
        extras = Extras(**said)
        lists = [extras.ends or [], *(extras.flags or {}).values()]
        if not all(type(token) is int and 0 <= token < size for tokens in lists for token in tokens):
            raise ValueError("tokens outside of the vocabulary")
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(failure(CALL, f"the field {FIELD} of the GGUF file is damaged ({error})")) from None
    return extras
