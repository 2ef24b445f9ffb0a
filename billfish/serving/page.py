"""The chat at /: one static file, and a policy that lets it load nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse

FILE = Path(__file__).with_name("page.html")


@cache
def page() -> HTMLResponse:
    """The page. Its own script and style are known by their digests; no other runs, whatever a model writes."""
    text = FILE.read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_digest(text, 'script')}; style-src {_digest(text, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _digest(text: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
