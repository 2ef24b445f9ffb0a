"""`billfish serve`."""

from __future__ import annotations

import argparse
import ipaddress
import sys

from billfish.cli.model_arguments import add_model_arguments, load_model, set_threads
from billfish.core.extras import folder_of
from billfish.core.terminal import warn
from billfish.llm.chat_template import start_process

PACKAGES = ("starlette", "uvicorn", "llguidance", "msgspec", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="A", help="the address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8080, metavar="P", help="the port; 0 takes a free one (default: 8080)"
    )
    parser.add_argument(
        "--streams", type=int, default=8, metavar="N", help="sequences that are generated together (default: 8)"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of a prompt and its answer (default: 4096, or the model's)"
    )
    parser.add_argument(
        "--queue", type=int, default=64, metavar="N", help="requests that wait; more get 429 (default: 64)"
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="keys of those who may use it, one a line (default: everybody may)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Answer requests until a signal comes."""
    for package in PACKAGES:
        folder_of(package, "serve")
    from billfish.serving.api.service import Service  # here: they need these packages
    from billfish.serving.engine.engine import Engine
    from billfish.serving.http.keys import Keys, read_keys
    from billfish.serving.http.server import Server, address, listen

    keys = Keys([]) if arguments.api_key_file is None else read_keys(arguments.api_key_file)
    with listen(arguments.host, arguments.port) as listening:
        set_threads("serve", arguments.threads)
        start_process()
        model = load_model("serve", arguments, arguments.model)
        engine = Engine(
            model,
            streams=arguments.streams,
            context=arguments.context,
            queue=arguments.queue,
            activations=arguments.activations,
        )
        service = Service(engine, model, model.path.stem if model.path.is_file() else model.path.name)
        bound = engine.counts().cache_bytes_bound / 1e6
        facts = f"{engine.streams} streams of {engine.context} tokens, caches of at most {bound:.0f} MB"

        def announce() -> None:
            print(f"{service.name} on {address(listening)}: {facts}, {model.decoder.about}")
            print(_who(arguments.host, bool(keys)), flush=True)

        try:
            Server(service, keys, announce).run([listening])
        finally:
            engine.close(finish=False)
            service.close()


def _who(host: str, has_keys: bool) -> str:
    """Who can use the server."""
    whom = "those who have a key" if has_keys else "everybody"
    if is_loopback(host):
        return f"It listens on {host}, for {whom} on this machine alone; --host 0.0.0.0 opens it to others."
    if not has_keys:
        warning = "Whoever reaches this machine can use it: --api-key-file FILE keeps others out."
        warn(warning, sys.stderr)
    return f"It listens on {host}, for {whom} who can reach this machine."


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
