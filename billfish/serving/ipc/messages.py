"""What fronts and the engine's process tell each other. Ids are the front's: each of its answers has one."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import msgspec

from billfish.llm.sampler import Sampling
from billfish.llm.thought_limit import ThoughtLimit
from billfish.serving.engine.engine_settings import EngineSettings
from billfish.serving.engine.requests import Request

HERE = ("grammar", "stop", "shown")  # of a request: they are for the front's eyes, or go another way


class Message(msgspec.Struct, array_like=True, tag=True):
    """All of them."""


# ---- from a front to the engine -------------------------------------------------------------------------------------


class Ask(Message):
    """Begin the answers `first`, `first` + 1, ... grammar: what all of them must be. Told with Taken or Refused."""

    first: int
    requests: list[dict[str, Any]]
    grammar: str | None


class Cancel(Message):
    """End an answer. enough: all is said that was wanted."""

    id: int
    enough: bool


class Abandon(Message):
    """Nobody waits any more for what was asked as `id`."""

    id: int


class Embed(Message):
    """Told with Vectors or Refused."""

    id: int
    texts: list[list[int]]


class Score(Message):
    """Told with Scores or Refused."""

    id: int
    texts: list[list[int]]
    alternatives: int


class AskState(Message):
    """How the server is: "ok", "closing" or "failed". Told with Reply."""

    id: int


class AskMetrics(Message):
    """All counts, as Prometheus reads them. Told with Reply."""

    id: int


class Keep(Message):
    """Keep some bytes for whichever front asks for them."""

    key: str
    data: bytes


class Fetch(Message):
    """What is kept. remove: and forget it. Told with Reply, or with Refused if there is nothing."""

    id: int
    key: str
    remove: bool


class Answered(Message):
    """An HTTP answer has begun. path: of a route, not of a client."""

    path: str
    status: int


class FirstPiece(Message):
    """The first piece of an answer has come, so long after its request was read."""

    seconds: float


class Ready(Message):
    """The front listens."""


# ---- from the engine to a front -------------------------------------------------------------------------------------


class Taken(Message):
    """Answers are in the queue."""

    id: int


class Refused(Message):
    """kind: one of `session.KINDS`."""

    id: int
    kind: str
    error: str


Best = list[tuple[int, float]]  # tokens with log probabilities
Ended = tuple[int, int | None, Best, str, str, int]  # id, and the fields of `Chosen` but `drafts`


class Step(Message):
    """What one step of the engine gave. tokens: ids of answers and their next tokens, by turns. scored: id, token and
    log probabilities, for answers that want these. ended: answers with their last token. drafts: of answers that had a
    draft, the tokens that were drafted and right since they began. cached: of answers whose first token this is, the
    tokens of the prompt that were not computed again, if there are any: a front may end an answer, with a stop text.
    progress: ids and fields of `Progress`, for answers that want it."""

    tokens: list[int]
    scored: list[tuple[int, int, Best]]
    ended: list[Ended]
    drafts: dict[int, tuple[int, int]]
    cached: dict[int, int]
    progress: list[tuple[int, int, int, int, float]]


class Vectors(Message):
    """Each is float32."""

    id: int
    vectors: list[bytes]


class Scores(Message):
    """As :meth:`billfish.serving.engine.engine.Engine.score` gives them."""

    id: int
    scores: list[list[Best]]


class Reply(Message):
    """To AskState, AskMetrics and Fetch."""

    id: int
    data: bytes


class Configure(Message):
    """The first message to a front. path: of the model. streams, context, queue, nbytes: of the engine. keys: digests.
    effort, budget: of reasoning. verbose: every chat is told its prompt. fronts: how many share the server's limits.
    adapters: names."""

    path: str
    name: str
    streams: int
    context: int
    queue: int
    nbytes: int
    strict_fields: bool
    effort: str | None
    budget: int | None
    verbose: bool
    keys: list[bytes]
    hosts: list[str]
    origins: list[str]
    share_prefixes: bool
    access_log: bool
    fronts: int
    adapters: list[str]


class Rotate(Message):
    """Other keys hold from now on."""

    keys: list[bytes]


class Closing(Message):
    """The server takes nothing more."""


class Exit(Message):
    """All answers are given: end when clients have read them."""


# ---- to and from an engine in a process of its own -------------------------------------------------------------------


class StartEngine(Message):
    """The first message to an engine's process. adapters: folders by names. Told with EngineReady or EngineFailed."""

    path: str
    adapters: dict[str, str]
    settings: EngineSettings


class EngineReady(Message):
    """The model is loaded. nbytes: of its weights. cache_bytes: that its KV cache takes at most. about: the device."""

    streams: int
    context: int
    queue: int
    nbytes: int
    cache_bytes: int
    about: str


class EngineFailed(Message):
    """The model is not loaded, and the process ends."""

    error: str


ToServer = Keep | Fetch | Answered | FirstPiece | Ready  # what needs no engine
ToEngine = Ask | Cancel | Abandon | Embed | Score | AskState | AskMetrics | ToServer
ToFront = Taken | Refused | Step | Vectors | Scores | Reply | Configure | Rotate | Closing | Exit
FromEngine = ToFront | EngineReady | EngineFailed


def packed(request: Request) -> dict[str, Any]:
    """A request as the engine needs it."""
    found = {each.name: getattr(request, each.name) for each in fields(request) if each.name not in HERE}
    sampling = request.sampling
    found["sampling"] = {each.name: getattr(sampling, each.name) for each in fields(sampling)}
    found["thought"] = None if request.thought is None else asdict(request.thought)
    return found


def unpacked(given: dict[str, Any], **more: Any) -> Request:
    """The request of `packed`. more: what it does not have."""
    thought = None if given["thought"] is None else ThoughtLimit(**given["thought"])
    return Request(**{**given, "sampling": Sampling(**given["sampling"]), "thought": thought}, **more)
