"""`billfish serve`: an HTTP server for a language model."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import signal
import socket
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from billfish.checkpoints.hub import fetch_model, is_hub_name
from billfish.cli.model_arguments import (
    add_draft_arguments,
    add_lora_argument,
    add_model_arguments,
    set_threads,
)
from billfish.core.errors import BillfishError, DataError, bad_argument, readable
from billfish.core.extras import folder_of
from billfish.core.files import path_of
from billfish.core.machine import allowed_cores
from billfish.llm.chat_answer import EFFORT_NAMES
from billfish.llm.chat_template import start_process
from billfish.llm.devices import device_memory, is_gpu

if TYPE_CHECKING:
    from billfish.serving.engine.engine_settings import EngineSettings
    from billfish.serving.http.keys import Keys
    from billfish.serving.http.server import ReadKeys

LOG = logging.getLogger(__name__)
MOST_FRONTS = 64
MEMORY = "80%"  # of the device's, for several models
PACKAGES = ("starlette", "uvicorn", "llguidance", "msgspec", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, several="; of several, each is loaded when a request names it")
    parser.add_argument(
        "--models",
        dest="folder",
        metavar="FOLDER",
        help="serve all GGUF files and model folders in FOLDER, each loaded when a request names it (default: none)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory for all loaded models together, weights and KV caches, such as 24GB, or 80%% of the device's; the "
        f"least recently used ones are unloaded to make room (default: {MEMORY.replace('%', '%%')})",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="A", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8080, metavar="P", help="port to listen on; 0 picks a free one (default: 8080)"
    )
    parser.add_argument(
        "--streams",
        type=int,
        default=8,
        metavar="N",
        help="most requests that are decoded at the same time (default: 8)",
    )
    parser.add_argument(
        "-c",
        "--context",
        type=int,
        metavar="N",
        help="longest prompt and answer of a request together, in tokens (default: 4096, or the model's if shorter)",
    )
    parser.add_argument(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="tokens that the KV caches of all streams hold together; where they end, the latest request waits "
        "(default: --streams times --context; on a GPU, what fits)",
    )
    parser.add_argument(
        "--queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait; more are refused with status 429 (default: 64)",
    )
    parser.add_argument(
        "-a",
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model in the API; with several models, one for each in their order (default: name of the "
        "folder, or of the file without its extension)",
    )
    add_draft_arguments(parser)
    add_lora_argument(parser, "name that requests choose it by; with several models NAME@MODEL=FOLDER")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="accepted API key; may be repeated. Other users of this machine can see it in the list of "
        "processes: --api-key-file is safer (default: none)",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file of accepted API keys, one per line; SIGHUP reads it again (default: none)",
    )
    parser.add_argument(
        "--share-prefixes",
        action="store_true",
        help="reuse the KV cache of equal prompt prefixes among API keys. It saves time, and shows one key, by time "
        "and cached_tokens, how prompts of others begin (default: off)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name of this server in URLs; may be repeated. Without API keys, public names are refused unless they "
        "are allowed, against DNS rebinding (default: none)",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="site whose pages may use the server from a browser, such as https://chat.example.com; localhost for "
        "all of this machine, * for all that have an API key; may be repeated (default: none)",
    )
    parser.add_argument(
        "--strict-fields",
        action="store_true",
        help="refuse requests with unknown fields instead of ignoring these (default: off)",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="add the rendered prompt to chat completions, as __verbose (default: for requests with verbose)",
    )
    parser.add_argument(
        "--reasoning-effort",
        choices=EFFORT_NAMES,
        help="reasoning effort of requests that name none; none and minimal turn thoughts off (default: that of the "
        "model)",
    )
    parser.add_argument(
        "--reasoning-budget",
        type=int,
        metavar="N",
        help="most tokens of thoughts, for requests that name no budget; below 0 is no limit (default: -1)",
    )
    parser.add_argument(
        "--fronts",
        type=int,
        metavar="N",
        help="processes for HTTP, chat templates and tokenizers, beside the engine's; 0 runs them in the engine's. "
        "Several models have one process for all of that (default: on a GPU one for every four CPU cores, 1 to 8; on "
        "the CPU 0)",
    )
    parser.add_argument(
        "--no-access-log", action="store_true", help="do not log a line for each request (default: off)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Answer requests until a signal comes."""
    for package in PACKAGES:
        folder_of(package, "serve")
    from billfish.serving.api.service import EngineFacts, Service  # here: they need these packages
    from billfish.serving.engine.engine_settings import EngineSettings, start_engine
    from billfish.serving.http.fronts import Fronts
    from billfish.serving.http.keys import checked_keys, read_keys
    from billfish.serving.http.server import Server, address, listen
    from billfish.serving.ipc.client import EngineClient
    from billfish.serving.ipc.messages import Configure
    from billfish.serving.ipc.session import Host
    from billfish.serving.models.catalog import name_of

    paths = paths_of(arguments)

    def all_keys() -> Keys:
        given = checked_keys("--api-key", arguments.api_key)
        return given if arguments.api_key_file is None else given | read_keys(arguments.api_key_file)

    keys = all_keys()
    if "*" in arguments.cors_origin and not keys:
        wanted = "it beside API keys; without, every page could use the model"
        raise DataError(bad_argument("serve", "--cors-origin", "*", wanted))
    reread = all_keys if arguments.api_key_file is not None and hasattr(signal, "SIGHUP") else None
    with listen(arguments.host, arguments.port) as listening:
        set_threads("serve", arguments.threads)
        start_process()
        options = {
            "hosts": arguments.allow_host,
            "origins": arguments.cors_origin,
            "share_prefixes": arguments.share_prefixes,
            "access_log": not arguments.no_access_log,
        }
        settings = EngineSettings(**{each.name: getattr(arguments, each.name) for each in fields(EngineSettings)})
        if len(paths) > 1 or arguments.folder is not None:
            _serve_several(arguments, paths, settings, listening, keys, reread, options)
            return
        _check_single(arguments)
        engine = start_engine(paths[0] if paths else None, dict(arguments.lora), settings)
        model, host = engine.model, Host(engine)
        name = arguments.alias[0] if arguments.alias else name_of(model.path)
        facts = EngineFacts(engine.streams, engine.context, engine.queue_limit, model.decoder.nbytes)
        bound = engine.counts().cache_bytes_bound / 1e6
        about = f"{engine.streams} streams of {engine.context} tokens, KV cache of at most {bound:.0f} MB"
        url, fronts = address(listening), fronts_of(arguments.fronts, model.decoder.device)

        def announce() -> None:
            print(f"{name} on {url}: {about}, {model.decoder.about}")
            print(_who(arguments.host, bool(keys)), flush=True)

        try:
            if fronts:
                more = {**_asking(arguments), "keys": keys.digests, "fronts": fronts, "adapters": list(model.adapters)}
                told = Configure(path=str(model.path), name=name, **facts._asdict(), **more, **options)
                Fronts(host, listening, told, announce, reread).run()
            else:
                service = Service(EngineClient(model.tokenizer), model, facts, name, **_asking(arguments))
                service.warm_up()
                Server(host, service, keys, announce, **options, read_keys=reread).run([listening])
                service.close()
        finally:
            engine.close(finish=False)
        if engine.failure:
            raise BillfishError(f"serve: {engine.failure}")


def paths_of(arguments: argparse.Namespace) -> list[str]:
    """The models that the user names."""
    given: list[str] = arguments.models
    if given and arguments.model_option is not None:
        raise DataError("serve: Pass the model as MODEL or with -m, not both.")
    return given if arguments.model_option is None else [arguments.model_option]


def _asking(arguments: argparse.Namespace) -> dict[str, Any]:
    """How requests are read and answered."""
    return {
        "strict_fields": arguments.strict_fields,
        "effort": arguments.reasoning_effort,
        "budget": arguments.reasoning_budget,
        "verbose": arguments.verbose,
    }


def _check_single(arguments: argparse.Namespace) -> None:
    """Raises for options that only several models have."""
    if arguments.memory is not None:
        raise DataError("serve: --memory has no effect with one model, which stays loaded. Leave it out.")
    if len(arguments.alias) > 1:
        raise DataError("serve: There is one model and more than one --alias. Pass one.")


def _serve_several(
    arguments: argparse.Namespace,
    paths: list[str],
    settings: EngineSettings,
    listening: socket.socket,
    keys: Keys,
    read_keys: ReadKeys | None,
    options: dict[str, Any],
) -> None:
    """Answer requests with models that are loaded when they are asked for."""
    from billfish.serving.http.server import address
    from billfish.serving.models.catalog import catalog_of, in_words, memory_of, models_in
    from billfish.serving.models.http_process import PoolServer
    from billfish.serving.models.pool import ModelPool

    if sys.platform == "win32":
        raise DataError("serve: Several models need sockets that processes share, which Windows lacks. Pass one model.")
    if arguments.draft not in (None, "ngram", "off"):
        raise DataError("serve: With several models --draft is ngram or off: no model drafts for all vocabularies.")
    if arguments.fronts:
        raise DataError("serve: With several models one process speaks HTTP. Leave --fronts out.")
    found = [path_of("serve", fetch_model("serve", path) if is_hub_name(path) else path) for path in paths]
    if missing := next((path for path in found if not path.exists()), None):
        raise DataError(f"serve: no such file or folder: {readable(str(missing))}.")
    found += [] if arguments.folder is None else models_in(arguments.folder)
    catalog = catalog_of(found, arguments.alias, arguments.lora)
    total = device_memory(settings.device)
    memory = memory_of(arguments.memory or MEMORY, total)
    pool = ModelPool(catalog, settings, memory, on_gpu=is_gpu(settings.device), **_asking(arguments))

    def announce() -> None:
        names = ", ".join(readable(named.name) for named in catalog)
        print(f"{len(catalog)} models on {address(listening)}: {names}, loaded when they are asked for, ", end="")
        print(f"up to {in_words(memory)} together")
        print(_who(arguments.host, bool(keys)), flush=True)

    PoolServer(pool, keys, announce, **options, read_keys=read_keys).run([listening])


def fronts_of(given: int | None, device: str) -> int:
    """How many front processes there are."""
    if given is not None and (given < 0 or given > MOST_FRONTS):
        raise DataError(bad_argument("serve", "--fronts", given, f"0 to {MOST_FRONTS}"))
    if sys.platform == "win32":
        if given:
            raise DataError("serve: --fronts needs sockets that processes share, which Windows does not have. Use 0.")
        return 0
    if given is not None:
        return given
    return 0 if device == "cpu" else max(1, min(8, allowed_cores() // 4))


def _who(host: str, has_keys: bool) -> str:
    """Who can use the server."""
    whom = "Clients need an API key." if has_keys else "No API key is needed."
    if is_loopback(host):
        return f"It listens on {host}, which only this machine reaches; --host 0.0.0.0 opens it to others. {whom}"
    if not has_keys:
        LOG.warning("Whoever reaches this machine can use it. --api-key-file FILE keeps others out.")
    return f"It listens on {host}, for all who reach this machine. {whom}"


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
