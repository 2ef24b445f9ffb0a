"""Chat templates are programs of strangers: whatever they do, they end, and every failure is an error of ours."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cases import first

import billfish as bf
from billfish.llm import chat_template
from billfish.llm.chat_template import ChatTemplate

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="no limits of time and memory")
USER = [{"role": "user", "content": "hello"}]


@pytest.mark.promise("chat templates", "a template reaches no Python objects and no files; its errors become ours")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safe|immutable"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ raise_exception('x' * 100000) }}", "x{40}"),
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ none + 1 }}", "TypeError"),
        ("{{ messages | tojson(indent=none, nonsense=1) }}", "TypeError"),
        ("{{ cycler | tojson(default=strftime_now) }}", "TypeError: .*unexpected keyword argument 'default'"),
        ("{{ strftime_now(1) }}", "TypeError"),
        ("{{ '\\ud800'.encode() }}", "UnicodeEncodeError"),
        ("{{ 'a' * 10**7 }}", "ValueError: its text has 10000000 characters"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}", "RecursionError"),
    ],
)
def test_what_a_template_does_wrong_is_told(source, message):
    with pytest.raises(bf.ModelError, match=rf"messages .*\['user'\](?s:.*){message}") as caught:
        ChatTemplate(source).render(USER)
    assert len(str(caught.value)) < 1000


@pytest.mark.promise("chat templates", "time and memory are limited, even within one operation")
@POSIX
@pytest.mark.parametrize(
    "source",
    first(
        1,
        [
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
            "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
            "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
            "{{ lipsum(n=10**9) }}",
            "{{ (9 ** 999999) ** 9999 }}",
        ],
    ),
)
def test_time_is_limited(source):
    with pytest.raises(bf.ModelError, match=r"chat.template") as caught:
        ChatTemplate(source).render(USER)
    # On a fast machine the text of a list in lists takes all memory first.
    assert "more than 2 s" in str(caught.value) or "MemoryError" in str(caught.value)


@pytest.mark.promise("chat templates", "time and memory are limited, even within one operation")
@pytest.mark.skipif(sys.platform != "linux", reason="no limit of memory")
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a\n' | indent(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ ('a' * 10**6).replace('', 'a' * 10**6) }}",
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    ],
)
def test_memory_is_limited(source):
    with pytest.raises(bf.ModelError, match="MemoryError"):
        ChatTemplate(source).render(USER)


@pytest.mark.promise("chat templates", "a template that does not compile is an error, however deep or long")
@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 'open",
        "{{" + "(" * 300 + "1" + ")" * 300 + "}}",
        "{{" + "(" * 100_000 + "1" + ")" * 100_000 + "}}",
        "{{" + "-" * 5000 + "1 }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{{ " + "9" * 100_000 + " }}",
        "{{ messages " + "| upper " * 3000 + "}}",
        5,
        None,
        [{"name": "default"}],
    ],
)
def test_what_does_not_compile_is_told(source):
    with pytest.raises(bf.ModelError, match=r"jinja2 template .tokenizer\.chat_template") as caught:
        ChatTemplate(source)
    assert len(str(caught.value)) < 1000


@pytest.mark.promise("chat templates", "the next text works after a failure, and no process is left behind")
def test_a_template_goes_on_after_a_failure():
    """An error, a process that ended, and one that was killed."""
    source = "{% if messages[0].role == 'user' %}{{ messages[0].content }}{% else %}{{ 1/0 }}{% endif %}"
    template = ChatTemplate(source)
    for _ in range(2):
        with pytest.raises(bf.ModelError, match="division"):
            template.render([{"role": "other"}])
        assert template.render(USER) == "hello"
    template._process._process.kill()
    with pytest.raises(bf.ModelError, match="its process ended with status"):
        template.render(USER)
    assert template.render(USER) == "hello"


def test_text_of_any_characters_comes_back():
    content = "".join(map(chr, range(0x300))) + "🎣\u2028\ud800\r\udcff\n"
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": content}]) == content


def test_messages_that_are_no_json():
    with pytest.raises(bf.ModelError, match="not JSON: Object of type object is not JSON serializable"):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": object()}])


@pytest.mark.parametrize("messages", [[5], ["ab"], "text", [*USER, None]])
def test_messages_that_are_none(messages):
    with pytest.raises(bf.DataError, match=r"messages.*\w+.*dict with role"):
        ChatTemplate("{{ messages }}").render(messages)


def test_options_of_json():
    source = "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"
    assert ChatTemplate(source).render([{"role": "user", "content": "é"}]) == '{"content":"é","role":"user"}'


@pytest.mark.promise("chat templates", "its process has an empty environment and another folder: no tokens, no keys")
@pytest.mark.skipif(sys.platform != "linux", reason="looks at the process as Linux shows it")
def test_a_template_has_neither_environment_nor_folder_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat_template, "_started", [])
    template = ChatTemplate("{{ messages[0].content }}")
    place = Path("/proc", str(template._process._process.pid))
    names = {line.split(b"=")[0].decode() for line in (place / "environ").read_bytes().split(b"\0") if line}
    assert "TZ" in names
    assert names <= {*chat_template.ENVIRONMENT, "LC_CTYPE"}  # which Python sets itself
    assert os.readlink(place / "cwd") == "/"
    assert template.render(USER) == "hello"


def test_a_process_that_another_thread_took_is_no_error(monkeypatch):
    """Between the look at the list and the taking."""

    class Taken(list):
        def __bool__(self):
            return True

        def __getitem__(self, index):
            return ChatTemplate("")._process

    monkeypatch.setattr(chat_template, "_started", Taken())
    assert ChatTemplate("ok").render(USER) == "ok"


@pytest.mark.promise("threads", "matmuls, generation (even on one KV cache) and chat templates are thread-safe")
def test_threads_take_turns():
    template = ChatTemplate("{{ messages[0].content }}")
    wrong: list[str] = []

    def render(name: str) -> None:
        for i in range(50):
            content = f"{name} {i}"
            if template.render([{"role": "user", "content": content}]) != content:
                wrong.append(content)

    threads = [threading.Thread(target=render, args=(f"thread {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.promise("threads", "matmuls, generation (even on one KV cache) and chat templates are thread-safe")
@POSIX
def test_threads_are_not_disturbed_by_what_ends_the_process():
    template = ChatTemplate("{% for a in range(messages[0].n) %}{% for b in range(99999) %}{% endfor %}{% endfor %}ok")
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.extend(template.render([{"n": 1}]) for _ in range(5)))
    thread.start()
    with pytest.raises(bf.ModelError, match="more than 2 s"):
        template.render([{"n": 99999}])
    thread.join()
    assert texts == ["ok"] * 5


FORK = """
import os
from billfish.llm.chat_template import ChatTemplate

template = ChatTemplate("{{ messages[0].content }}")
children = []
for i in range(4):
    child = os.fork()
    if child == 0:
        texts = {template.render([{"content": f"{i} {j}"}]) == f"{i} {j}" for j in range(20)}
        os._exit(texts != {True})
    children.append(child)
for j in range(20):
    assert template.render([{"content": f"parent {j}"}]) == f"parent {j}"
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
del template
"""


@pytest.mark.promise("threads", "CPU kernels and chat templates work after a fork")
@POSIX
def test_a_fork_has_a_process_of_its_own():
    """In a process without threads: pytest's has some."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.promise("chat templates", "the next text works after a failure, and no process is left behind")
@POSIX
def test_nothing_is_left_of_a_process():
    template = ChatTemplate("")
    process = template._process._process
    assert process.poll() is None
    del template
    gc.collect()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_process_that_was_started_early_is_used():
    chat_template.start_process()
    [early] = chat_template._started
    assert ChatTemplate("")._process is early
    assert chat_template._started == []


def test_no_process_is_an_error_of_ours(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(chat_template, "_started", [])
    chat_template.start_process()
    with pytest.raises(bf.ModelError, match=r"does not start \(.*No such file"):
        ChatTemplate("")
