"""/openapi.json and /docs: the request bodies of all paths, from the types that check them."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import HTMLResponse
from starlette.routing import Route

import billfish
from billfish.serving.api.request_bodies import Body, accepted_words

STYLE = (
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:1rem auto;padding:0 1rem}"
    "td{padding:0 1rem 0 0;vertical-align:top}"
)


def description(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1. Types of the same name in different APIs are told apart by the module that they are from."""
    bodies = [body for body in (_body(route) for route in routes) if body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_body = dict(zip(bodies, schemas, strict=True))
    paths = dict[str, dict[str, Any]]()
    for route in routes:
        body = _body(route)
        names = re.findall(r"{(\w+)", route.path)
        said: dict[str, Any] = {"summary": _about(route), "responses": {"200": {"description": _about(route)}}}
        if names:
            said["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if body is not None:
            said["requestBody"] = {"required": True, "content": {"application/json": {"schema": by_body[body]}}}
        place = route.path.replace(":path", "")
        paths.setdefault(place, {})[_method(route).lower()] = said
    about = {"title": "billfish", "version": billfish.__version__}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": components}}


def description_page(routes: Sequence[Route]) -> HTMLResponse:
    """All paths with their fields, without a script."""
    parts = []
    for route in routes:
        body = _body(route)
        title = html.escape(f"{_method(route)} {route.path.replace(':path', '')}")
        parts.append(f"<h2><code>{title}</code></h2><p>{html.escape(_about(route))}</p>")
        if body is not None:
            rows = [
                f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(accepted_words(body, name))}</td></tr>"
                for name in body.__struct_encode_fields__
            ]
            parts.append(f"<table>{''.join(rows)}</table>")
    text = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>billfish API</title><style>{STYLE}</style>'
    headers = {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(f"{text}<h1>billfish API</h1>{''.join(parts)}</html>", headers=headers)


def _body(route: Route) -> type[Body] | None:
    return getattr(route.endpoint, "body", None)


def _about(route: Route) -> str:
    return str(getattr(route.endpoint, "about", ""))


def _method(route: Route) -> str:
    return min((route.methods or {"GET"}) - {"HEAD"})
