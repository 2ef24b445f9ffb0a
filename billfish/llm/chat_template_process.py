"""The process that a chat template runs in. :mod:`billfish.llm.chat_template` starts it as a script.

A template is a program from a stranger. jinja2's sandbox keeps it away from Python's objects, but a loop or a single
operation such as `9 ** 9 ** 9` can take all time and memory there is. Python cannot stop an operation that has begun;
the system can. It ends this process after SECONDS of processor time and refuses memory beyond MEMORY_BYTES.

Each line of standard input is a JSON value. The first is the template; an answer says that it compiles. Each further
one holds the names that the template may use; the answer is the text. An answer is one line as well: {"text": ...} or
{"error": ...}.

Only the standard library and jinja2 are imported, as the first prompt waits for that.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

SECONDS = 2  # of processor time for a request; a template of a model takes some milliseconds
# For a request that is empty; and beyond that, for each byte of a request.
MEMORY_BYTES, MEMORY_FACTOR = 64_000_000, 8
TEXT_LENGTH, TEXT_FACTOR = 1_000_000, 8
ERROR_LENGTH = 500


def main(folders: list[str]) -> None:
    """Answer requests until there are no more; `folders` are where jinja2 and what it needs are."""
    sys.path += folders  # last, so that they shadow nothing
    environment = sandbox()
    template: Any = None
    while line := sys.stdin.buffer.readline():
        with limits(len(line)):
            try:
                request = json.loads(line)
                if template is None:
                    template = environment.from_string(request)
                    answer = {"text": ""}
                else:
                    answer = {"text": checked_text(template.render(request), len(line))}
            except BaseException as error:  # whatever a template raises: MemoryError, RecursionError, ...
                answer = {"error": describe(error)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def sandbox() -> Any:
    """What compiles templates, with the functions that models' templates call."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    class Generation(Extension):
        """{% generation %} marks what a model has written, for training. It changes no text."""

        tags = {"generation"}  # as jinja2 has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes characters of HTML, which no model was trained on. Other options of json.dumps are functions,
    # which it would call past the sandbox.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def checked_text(text: str, request_bytes: int) -> str:
    longest = TEXT_LENGTH + TEXT_FACTOR * request_bytes
    if len(text) > longest:
        raise ValueError(f"its text has {len(text)} characters; the limit is {longest}")
    return text


def describe(error: BaseException) -> str:
    """What the user is told."""
    own = type(error).__module__.startswith("jinja2.")  # whose messages are sentences
    text = str(error) if own else f"{type(error).__name__}: {error}"
    return text[:ERROR_LENGTH]


@contextlib.contextmanager
def limits(request_bytes: int) -> Iterator[None]:
    """Within, processor time and memory are limited. Windows limits neither, macOS no memory."""
    if sys.platform == "win32":
        yield
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MEMORY_BYTES + MEMORY_FACTOR * request_bytes
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(OSError, ValueError):  # a system that has no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whoever started us may have ignored or blocked it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # then comes SIGPROF, which ends the process
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
