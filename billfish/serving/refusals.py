"""What the server answers instead of what was asked: a status, and OpenAI's shape of an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from billfish.core.errors import BillfishError, complaint

KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class Refusal(BillfishError):
    """Becomes an HTTP answer. param: the field that is wrong. code: a word for programs."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        """headers: of the answer; `retry_after` is Retry-After."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> dict[str, Any]:
        """The JSON of the answer, or of an event where an answer has begun."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def wrong(call: str, field: str, got: object, takes: str, code: str | None = None) -> Refusal:
    """400 for a field: what it holds, and what it may hold."""
    return Refusal(400, complaint(call, field, shown(got), takes), field, code)


def shown(value: object) -> str:
    """A JSON value in a message: its type where it has many parts."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object of {len(value)}"
    return str(value) if isinstance(value, Described) else json.dumps(value, ensure_ascii=False)


class Described(str):
    """A sentence about a value, to be shown as it is."""

    __slots__ = ()
