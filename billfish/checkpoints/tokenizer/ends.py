"""The tokens after which an answer is over: one rule for GGUF files and folders.

Ends are the tokens that the model's files name, and tokens that are known as ends by their text. What ends a turn
differs between formats of chats, so the chat template decides: a model ends its turns with what its template writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from billfish.checkpoints.tokenizer.tokenizer import CONTROL, USER_DEFINED

# Control tokens that end a text, in a chat or not.
TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<seed:eos>")
# Tokens that end a turn in some format of chats, where a template writes them or there is no template.
TURN_ENDS = (
    "<|im_end|>",  # ChatML
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3.1, a turn that calls a tool
    "<end_of_turn>",  # Gemma 1 to 3
    "<turn|>",  # Gemma 4
    "<|tool_response>",  # Gemma 4, a turn that calls a tool
    "<|end|>",  # Phi
    "<|return|>",  # gpt-oss
    "<|call|>",  # gpt-oss, a turn that calls a tool
    "[e~[",  # MiniMax
)
# In gpt-oss's format, called harmony, <|end|> closes a message, such as the chain of thought, and others follow it.
HARMONY, MESSAGE_END = ("<|return|>", "<|channel|>"), "<|end|>"


def end_tokens(pieces: Sequence[str], kinds: Sequence[int], named: Iterable[int], template: object) -> frozenset[int]:
    """The end tokens of a model.

    pieces, kinds: the vocabulary, with GGUF's numbers for kinds. named: tokens that the model's files name as ends.
    template: the text of the chat template, or None.
    """
    added = {pieces[i]: i for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)}
    ends = set(named)
    ends |= {added[name] for name in TEXT_ENDS if name in added and kinds[added[name]] == CONTROL}
    ends |= {added[name] for name in TURN_ENDS if name in added and (not isinstance(template, str) or name in template)}
    if all(name in added for name in HARMONY):
        ends.discard(added.get(MESSAGE_END, -1))
    return frozenset(ends)
