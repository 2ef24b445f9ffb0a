"""Who may ask: the keys of --api-key and --api-key-file."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from billfish.core.errors import DataError, failure
from billfish.serving.api.request_bodies import Refusal


class Keys:
    """The keys that are let in. Without any, everybody is."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __or__(self, other: Keys) -> Keys:
        """The keys of both."""
        both = Keys([])
        both._digests = self._digests + other._digests
        return both

    @classmethod
    def of_digests(cls, digests: list[bytes]) -> Keys:
        """Those of another process."""
        made = cls([])
        made._digests = digests
        return made

    @property
    def digests(self) -> list[bytes]:
        """What `of_digests` takes."""
        return self._digests

    def replace(self, other: Keys) -> None:
        """Let in the keys of another object instead, from now on."""
        self._digests = other._digests

    def __len__(self) -> int:
        return len(self._digests)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> bytes:
        """The digest of the key that the header `Authorization` brings; empty where there are no keys. Raises 401 for
        any other.

        All keys are compared, each in a time that does not depend on where it differs or how long it is.
        """
        if not self._digests:
            return b""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        known = sum(hmac.compare_digest(given, digest) for digest in self._digests)
        if not known or scheme.lower() != "bearer":
            problem = "The request has no API key." if authorization is None else "The API key is wrong."
            message = f"{problem} Send the header Authorization: Bearer KEY."
            raise Refusal(401, message, None, "invalid_api_key", www_authenticate="Bearer")
        return given


def read_keys(path: str) -> Keys:
    """The keys of a file, one a line. Empty lines and those that begin with # are none."""
    try:
        lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(failure("serve", f"cannot read --api-key-file: {error}")) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise DataError(failure("serve", f"--api-key-file {path} has no keys", "Write one key per line."))
    return checked_keys("--api-key-file", keys)


def checked_keys(option: str, keys: list[str]) -> Keys:
    """Raises unless clients can send these keys in a header. The message does not show them."""
    if not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
        raise DataError(failure("serve", f"{option} has a key with spaces or non-ASCII characters"))
    return Keys(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
