"""Compiles JSON schemas and grammars of strangers: first in a process with limits, then in a thread of the server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from billfish.core.errors import BackendUnavailable, BillfishError, DataError, failure
from billfish.core.extras import folder_of
from billfish.llm import grammar_process
from billfish.llm.chat_template import ENVIRONMENT
from billfish.llm.grammar import CALL, EXTRA, CompiledGrammar, Grammar, Vocabulary, compile_grammar, json_object
from billfish.llm.grammar_process import CPU_SECONDS, MEMORY_BYTES, STACK_BYTES, WALL_SECONDS
from billfish.serving.engine.requests import QueueFull, ServerClosing

THREADS = 2  # schemas that are compiled at once
QUEUE = 32  # schemas that wait for a thread
QUEUE_SECONDS = 10.0  # and how long they wait
TRIED = 1024  # schemas that are known to compile, and need no process again
THREAD_STACK_BYTES = 64 * 2**20  # more than STACK_BYTES: what the process could compile, the server can
START_SECONDS = 20.0  # for the process to import llguidance and to read the vocabulary


class _Job(NamedTuple):
    grammar: Grammar
    since: float
    done: Future[CompiledGrammar]


class GrammarCompiler:
    """Compiles grammars for a vocabulary, in a few threads of its own. They start with the first grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._process = vocabulary, GrammarProcess(vocabulary)
        self._jobs: queue.Queue[_Job | None] = queue.Queue(QUEUE)
        self._lock = threading.Lock()  # held for what follows
        self._threads: list[threading.Thread] = []
        self._tried: OrderedDict[bytes, None] = OrderedDict()  # digests of schemas, the latest last
        self._closing = False

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Begin to compile. Raises QueueFull or ServerClosing at once. The future raises DataError for a schema that
        cannot be used or takes too much, and QueueFull if it has waited too long."""
        done: Future[CompiledGrammar] = Future()
        with self._lock:
            self._check_open()
            if not self._threads:
                self._threads = [start_thread(self._work, f"billfish-grammar-{i}") for i in range(THREADS)]
            try:
                self._jobs.put_nowait(_Job(grammar, time.monotonic(), done))
            except queue.Full:
                raise QueueFull(f"{QUEUE} schemas are waiting to be compiled. Retry later.") from None
        return done

    def warm(self) -> None:
        """Do what the first grammar would wait for, and whoever runs beside it: start the process, and give llguidance
        the vocabulary. Nothing, where a grammar would be refused."""
        with contextlib.suppress(BillfishError):
            self.compile(json_object()).result()

    def close(self) -> None:
        """End the process and the threads. Grammars that are not compiled raise ServerClosing."""
        with self._lock:
            self._closing = True
        self._process.close()
        for _ in self._threads:
            self._jobs.put(None)  # the threads empty the queue up to here
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.done.set_running_or_notify_cancel():
                continue  # nobody waits for it
            try:
                self._check_open()
                if time.monotonic() - job.since > QUEUE_SECONDS:
                    raise QueueFull(f"The schema waited {QUEUE_SECONDS:g} s to be compiled. Retry later.")
                job.done.set_result(self._compiled(job.grammar))
            except BaseException as error:
                job.done.set_exception(error)

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        schema = grammar.schema
        digest = hashlib.sha256(schema.encode()).digest()
        with self._lock:
            known = digest in self._tried
        if not known and sys.platform != "win32":  # which has no fork: the limits of size alone guard it
            answer = self._process.try_schema(schema)
            self._check_open()  # closing ends the process
            if "error" in answer:
                raise DataError(failure(CALL, f"llguidance cannot compile the schema: {answer['error']}"))
            if "lark" in answer:  # not remembered, so that the next one is converted in the process as well
                return compile_grammar(Grammar(answer["lark"]), self._vocabulary)
        compiled = compile_grammar(grammar, self._vocabulary)
        with self._lock:
            self._tried[digest] = None
            self._tried.move_to_end(digest)
            if len(self._tried) > TRIED:
                self._tried.popitem(last=False)
        return compiled

    def _check_open(self) -> None:
        if self._closing:
            raise ServerClosing("The server is shutting down. Retry later.")


class GrammarProcess:
    """The process of grammar_process.py. It starts with the first schema, and again if it has ended."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # held for what follows
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closing = False

    def try_schema(self, schema: str) -> dict[str, str]:
        """Compile a schema in a fork of the process. Returns {} if it can be used, {"lark": ...} for a grammar that was
        converted, or {"error": what is wrong}. Waits a bounded time."""
        answer = self._ask(schema.encode())
        if answer is not None:
            return answer
        memory, stack = f"{MEMORY_BYTES >> 20} MiB of memory", f"{STACK_BYTES >> 20} MiB of stack"
        return {"error": f"it needs more than {CPU_SECONDS} s, {memory} or {stack}"}

    def close(self) -> None:
        """End the process and its forks."""
        with self._lock:
            self._closing = True
            self._end()

    def _ask(self, schema: bytes) -> dict[str, str] | None:
        """The answer of a fork; None if it was ended."""
        for _ in range(2):
            with self._lock:
                if self._closing:
                    return None
                if self._control is None or _is_closed(self._control):
                    self._end()
                    self._control = self._start()
                control = self._control
            answer = _exchange(control, schema, WALL_SECONDS + 1)
            if answer is not None or not _is_closed(control):
                return answer
        return None

    def _start(self) -> socket.socket:
        """Start the process, and return the socket that it listens on."""
        vocabulary = json.dumps(self._vocabulary.record()).encode()
        folder = str(folder_of("llguidance", EXTRA).parent)
        # Isolated from settings, folders and packages of the user: it starts faster, and nothing else is imported.
        command = [sys.executable or "", "-I", "-S", *map(os.path.abspath, (grammar_process.__file__, folder))]
        control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=os.sep,
                    env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                    start_new_session=True,  # Ctrl-C is for us alone, and `_end` ends its forks with it
                )
            if _exchange(control, vocabulary, START_SECONDS) is None:
                raise OSError("it did not start")
        except OSError as error:
            control.close()
            self._end()
            raise BackendUnavailable(failure(CALL, f"cannot start a process to compile the schema: {error}")) from None
        return control

    def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):  # nothing of it runs any more
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None


def _is_closed(control: socket.socket) -> bool:
    """Whether the process has ended. It never writes to this socket."""
    try:
        return control.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _exchange(control: socket.socket, request: bytes, seconds: float) -> dict[str, str] | None:
    """Send a request to the process on a socket of its own. None if nobody answers within `seconds`."""
    ours, theirs = socket.socketpair()
    with ours, contextlib.suppress(OSError):  # whoever should answer has ended, or takes too long
        ours.settimeout(seconds)
        with theirs:
            socket.send_fds(control, [b"."], [theirs.fileno()])
        ours.sendall(request)
        ours.shutdown(socket.SHUT_WR)
        with ours.makefile("rb") as answer:
            read = answer.read()
        if read:
            found: dict[str, str] = json.loads(read)
            return found
    return None


_stack_size = threading.Lock()  # Python has one setting for all threads


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread with THREAD_STACK_BYTES of stack, for what recurses in llguidance."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with _stack_size:
        usual = threading.stack_size(THREAD_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return thread
