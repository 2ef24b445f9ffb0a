"""From the tokens of an engine to text: whoever asks for an answer does this, apart from the engine's thread."""

from __future__ import annotations

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import explained
from billfish.llm.detokenizer import Detokenizer, Piece
from billfish.serving.engine.requests import Chosen, Request


class AnswerText:
    """The text of one answer, piece by piece. Characters in parts, and what may begin a stop text, wait.

    completion_tokens: those that were taken, with the model's end and with those of a stop text. ended: nothing more
    comes. A stop text is found here and not in the engine, which may have gone on by a token or two: these are not
    taken.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.completion_tokens, self.ended = 0, False
        self._detokenizer = Detokenizer(tokenizer, request.stop, request.shown)

    def take(self, chosen: Chosen) -> Piece | None:
        """What goes out; None behind the end."""
        if self.ended:
            return None
        self.completion_tokens += chosen.token is not None
        try:
            if chosen.token is None:
                piece = self._detokenizer.end(chosen.finished, chosen.error)
            else:
                piece = self._detokenizer.take(chosen.token, chosen.scored, chosen.finished)
        except Exception as error:  # of this answer alone
            piece = Piece("", (), "failed", explained(error))
        self.ended = bool(piece.finished)
        return piece
