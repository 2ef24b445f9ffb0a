"""`billfish run` at a terminal and in a pipe: the commands of a chat, JSON alone, models without a chat template."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from llm_models import Small, write_model

from billfish.backends.cpu import _cpu
from billfish.cli import run
from billfish.cli.main import main, parser_of
from billfish.llm import load


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(file, Small())
    return file


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A model without a chat template."""
    file = tmp_path_factory.mktemp("models") / "bare.gguf"
    write_model(file, Small(template=""))
    return file


# ---- JSON -----------------------------------------------------------------------------------------------------------


def test_json_is_alone_on_standard_output(path, capsys):
    assert main(["run", str(path), "-p", "ab", "-n", "3", "--json", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert found["finish_reason"] == "length"
    assert found["generated_tokens"] == 3
    main(["run", str(path), "-p", "ab", "-n", "3", "--seed", "1"])
    assert capsys.readouterr().out == found["text"] + "\n"


def test_settings_of_sampling_reach_the_model(path, capsys):
    how = {"temperature": 1.5, "top_k": 100, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 4}
    options = [word for name, value in how.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    main(["run", str(path), "-p", "ab", "-n", "12", "--json", "--raw", *options])
    expected = load(path).generate("ab", max_tokens=12, raw=True, **how)
    assert json.loads(capsys.readouterr().out)["text"] == "".join(expected)


def test_the_newline_of_echo_is_no_part_of_the_prompt(path, capsys, monkeypatch):
    counts = []
    for text in ("ab", "ab\n", "ab\n\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        main(["run", str(path), "-n", "3", "--json"])
        counts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert counts == [counts[0], counts[0], counts[0] + 1]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_why_an_answer_ended(path, reason):
    model = load(path)
    answer = model.chat([{"role": "user", "content": "ab"}], max_tokens=1)
    answer.generation.finish_reason = reason
    assert run._record(answer, 0.0, model)["finish_reason"] == reason


def test_a_chat_is_no_json(path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["run", str(path), "--json"]) == 2
    error = capsys.readouterr().err
    assert "--json" in error
    assert "-p TEXT" in error


# ---- thoughts -------------------------------------------------------------------------------------------------------

THINKING = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.reasoning_content %}<think>\n"
    "{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ reasoning_effort }}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A random model, whose thoughts never end by themselves."""
    file = tmp_path_factory.mktemp("models") / "thinking.gguf"
    write_model(file, Small(template=THINKING, context=512))
    return file


def test_effort_and_budget_are_those_of_model_chat(thinking, capsys):
    words = ["run", str(thinking), "-p", "abba", "-n", "60", "--temperature", "0", "--json"]
    told = {}
    for effort, budget in ((None, None), ("high", None), ("none", None), (None, 4), ("high", 0), (None, -1)):
        options = [] if effort is None else ["--reasoning-effort", effort]
        assert main([*words, *options, *([] if budget is None else ["--reasoning-budget", str(budget)])]) == 0
        told[effort, budget] = found = json.loads(capsys.readouterr().out)
        expected = load(thinking).chat(
            [{"role": "user", "content": "abba"}],
            max_tokens=60,
            temperature=0,
            reasoning_effort=effort,
            reasoning_budget=budget,
        )
        assert (found["text"], found["reasoning_content"]) == (expected.content, expected.reasoning_content)
    assert told[None, None] == told[None, -1] | {name: told[None, None][name] for name in RATES}
    assert told["high", None]["prompt_tokens"] == told[None, None]["prompt_tokens"] + len("high")
    assert not told[None, None]["text"]
    assert not told["none", None]["reasoning_content"]
    assert told["none", None]["text"]
    assert len(told[None, 4]["reasoning_content"]) <= 4
    assert told[None, 4]["text"]


RATES = ("prompt_tok_per_s", "generation_tok_per_s", "time_to_first_token_s")


def test_thoughts_are_no_part_of_standard_output(thinking, capsys):
    words = ["run", str(thinking), "-p", "abba", "-n", "60", "--temperature", "0", "--reasoning-budget", "4"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.out == found["text"] + "\n"
    assert shown.err.startswith(found["reasoning_content"] + "\n")


def test_a_thought_that_is_cut_ends_its_line_on_standard_error(thinking, capsys):
    assert main(["run", str(thinking), "-p", "abba", "-n", "9", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(r"\nprompt .* tok/s", shown.err), shown.err
    printer = run.Printer()
    printer.show({"reasoning_content": "abc"})
    printer.end(" …")
    assert capsys.readouterr() == ("", "abc …\n")


def test_a_chat_keeps_thoughts_apart(thinking, monkeypatch, capsys):
    chat = run.Chat(load(thinking), parser_of("run").parse_args(["-n", "40", "--reasoning-budget", "4"]))
    chat.answer("abba")
    told = chat._messages[-1]
    assert told["reasoning_content"] in capsys.readouterr().err
    assert "think" not in told["content"]


@pytest.mark.parametrize("option", ["--reasoning-effort none", "--reasoning-budget 4"])
def test_a_raw_prompt_has_no_effort(path, option, capsys):
    assert main(["run", str(path), "-p", "ab", "--raw", *option.split()]) == 2
    error = capsys.readouterr().err
    assert option.split()[0] in error
    assert "--raw" in error


# ---- without a template ---------------------------------------------------------------------------------------------


def test_a_model_without_a_template_wants_raw(bare, capsys):
    assert main(["run", str(bare), "-p", "ab"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for fact in ("small llama", "no chat template", "--raw"):
        assert fact in captured.err
    assert main(["run", str(bare), "-p", "ab", "-n", "2", "--raw"]) == 0


def test_a_raw_chat_continues_each_line_as_it_is(path, capsys):
    """With a template in the file, too."""
    model = load(path)
    chat = run.Chat(model, parser_of("run").parse_args(["-n", "2", "--raw", "--temperature", "0"]))
    chat.answer("ab")
    expected = "".join(model.generate("ab", max_tokens=2, raw=True))
    assert capsys.readouterr().out == expected + "\n"


# ---- the chat -------------------------------------------------------------------------------------------------------


class Talk:
    """A chat that is told these lines."""

    def __init__(self, path, monkeypatch, *lines):
        self.chat = run.Chat(load(path), parser_of("run").parse_args(["-n", "2", "--system", "old"]))
        self.told = iter([*lines, EOFError])
        monkeypatch.setattr("builtins.input", self._next)
        self.chat.talk()

    def _next(self, prompt):
        line = next(self.told)
        if isinstance(line, str):
            return line
        raise line

    @property
    def messages(self):
        return [(message["role"], message["content"]) for message in self.chat._messages]


def test_a_chat_needs_no_readline(path, monkeypatch):
    """Windows has none."""
    monkeypatch.setitem(sys.modules, "readline", None)
    assert len(Talk(path, monkeypatch, "ab").messages) == 3


def test_clear_forgets_all_but_the_system(path, monkeypatch, capsys):
    assert len(Talk(path, monkeypatch, "ab").messages) == 3
    assert Talk(path, monkeypatch, "ab", "/clear").messages == [("system", "old")]
    assert "new conversation" in capsys.readouterr().out


def test_system_is_told_anew(path, monkeypatch):
    assert Talk(path, monkeypatch, "ab", "/system  be brief ").messages == [("system", "be brief")]
    assert Talk(path, monkeypatch, "/system").messages == []
    assert Talk(path, monkeypatch, "/system new", "ab", "/clear").messages == [("system", "new")]


def test_help_names_every_command(path, monkeypatch, capsys):
    talk = Talk(path, monkeypatch, "/help")
    shown = capsys.readouterr().out
    assert talk.messages == [("system", "old")]
    for command in ("/clear", "/system TEXT", "/regen", "/save FILE", "/exit", "Ctrl-C", '"""'):
        assert command in shown


def test_an_unknown_command_is_not_said_to_the_model(path, monkeypatch, capsys):
    talk = Talk(path, monkeypatch, "/nothing at all")
    shown = capsys.readouterr().out
    assert "/nothing" in shown
    assert "/help" in shown
    assert talk.messages == [("system", "old")]
    assert ("user", "/usr/bin ab") in Talk(path, monkeypatch, "/usr/bin ab").messages


def test_messages_of_several_lines(path, monkeypatch):
    talk = Talk(path, monkeypatch, "a\\\\".replace("\\\\", "\\"), "b", '"""', "c", "", "d", '"""')
    assert [content for role, content in talk.messages if role == "user"] == ["a\nb", "c\n\nd"]


def test_regen_answers_the_last_message_again(path, monkeypatch, capsys):
    talk = Talk(path, monkeypatch, "/regen", "ab", "ba", "/regen")
    assert [role for role, _ in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.messages[3] == ("user", "ba")
    shown = capsys.readouterr()
    assert "no message" in shown.out
    assert shown.err.count("answer 2 tokens") == 3


def test_save_writes_the_conversation_once(path, monkeypatch, capsys, tmp_path):
    file = tmp_path / "chat.json"
    talk = Talk(path, monkeypatch, "ab", f"/save {file}", f"/save {file}", "/save")
    assert [(each["role"], each["content"]) for each in json.loads(file.read_text())] == talk.messages
    shown = capsys.readouterr().out
    assert "3 messages" in shown
    assert "cannot write" in shown
    assert "needs the name" in shown


def test_defaults_are_what_the_models_files_recommend(path):
    from types import SimpleNamespace

    from billfish.llm.sampling_defaults import USUAL, sampling_defaults, with_defaults

    model = load(path)
    assert sampling_defaults(model) == USUAL == {"temperature": 0.8, "top_p": 0.95}
    folder = path.parent / "recommends"
    folder.mkdir()
    fake = SimpleNamespace(path=folder, source=SimpleNamespace(fields={}))
    assert sampling_defaults(fake) == USUAL
    for said, found in (
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"temperature": "hot", "top_p": 7, "top_k": -1}, {"top_k": 0}),
        ([1], USUAL),
    ):
        (folder / "generation_config.json").write_text(json.dumps(said))
        assert sampling_defaults(fake) == found
    fields = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7, "general.sampling.penalty_repeat": 1.5}
    write_model(path.parent / "fields.gguf", Small(fields=fields))
    expected = {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5}
    assert sampling_defaults(load(path.parent / "fields.gguf")) == expected
    assert with_defaults(USUAL, {"temperature": 0.5}) == {"temperature": 0.5}
    assert with_defaults({"top_k": 20}, {"temperature": 0.5, "top_p": None}) == {"top_k": 20, "temperature": 0.5}


def test_exit_ends_the_chat(path, monkeypatch):
    talk = Talk(path, monkeypatch, "/exit", "never said")
    assert list(talk.told) == ["never said", EOFError]


def test_a_chat_in_a_terminal(path):
    """Through a pseudo-terminal: Ctrl-C at the prompt and in the middle shows no traceback, /exit ends with 0."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "billfish", "run", str(path), "-n", "3"]
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_own
    )
    os.close(theirs)
    seen = ""

    def until(text, start=0, typed=""):
        """Reads until a text is seen. A Ctrl-C that comes just before Python waits for a key has to be typed again."""
        nonlocal seen
        for _ in range(24):
            while text not in seen[start:] and select.select([ours], [], [], 5)[0]:
                seen += os.read(ours, 4096).decode(errors="replace")
            if text in seen[start:]:
                return
            if typed == "\x03":
                os.write(ours, typed.encode())
        raise AssertionError(seen)

    try:
        until("\n> ")
        for line, answer in (("/help\n", "/clear"), ("ab\n", "answer 3 tokens"), ("\x03", "> "), ("/exit\n", "exit")):
            start = len(seen)
            os.write(ours, line.encode())
            until(answer, start, line)
            if line != "/exit\n":
                until("> ", start + seen[start:].index(answer))
        assert child.wait(120) == 0
        assert "Traceback" not in seen
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def _own():
    """Makes the terminal the child's own, so that Ctrl-C in it is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which `nohup` makes children ignore


# ---- standard input -------------------------------------------------------------------------------------------------


def prompt_tokens(path, *words, text=None):
    """How long the prompt of a command was, with a text in a pipe."""
    command = [sys.executable, "-m", "billfish", "run", str(path), "-n", "1", "--json", "--raw", *words]
    source = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    done = subprocess.run(command, capture_output=True, text=True, **source)
    return json.loads(done.stdout)["prompt_tokens"] if done.returncode == 0 else done.stderr


def test_a_prompt_and_a_text_in_a_pipe_are_both_read(path):
    """A question and what it is about; the pipe was dropped."""
    alone = prompt_tokens(path, "-p", "aa")
    assert prompt_tokens(path, "-p", "aa", text="bbb\n") == alone + len("\n\n") + len("bbb")
    assert prompt_tokens(path, "-p", "aa", text="") == alone


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_no_prompt_at_all_says_what_to_do(path, text):
    error = prompt_tokens(path, text=text)
    assert "standard input" in error
    assert "-p TEXT" in error


def test_a_prompt_is_an_argument_an_option_a_file_or_all(path, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("bb\n")
    file, words = str(tmp_path / "prompt.txt"), ["-n", "1", "--json", "--raw"]
    told = {}
    for line in (
        [str(path), "aa"],
        [str(path), "-p", "aa"],
        ["-m", str(path), "aa"],
        ["aa", "-m", str(path)],
        ["-m", str(path), "-p", "aa"],
        [str(path), "-f", file],
        [str(path), "aa", "-f", file],
        [str(path), "-f", file, "-p", "aa"],
    ):
        assert main(["run", line[0], *words, *line[1:]] if line[0] != "-m" else ["run", *line, *words]) == 0
        told[tuple(line)] = json.loads(capsys.readouterr().out)["prompt_tokens"]
    assert [*told.values()] == [told[str(path), "aa"]] * 6 + [told[str(path), "aa"] + len("\n\nbb")] * 2


@pytest.mark.parametrize("line", ["PATH aa -p bb", "PATH aa -m PATH", "PATH -m PATH -p bb"])
def test_a_model_or_a_prompt_that_is_given_twice(path, line, capsys):
    assert main(["run", *(str(path) if word == "PATH" else word for word in line.split())]) == 2
    error = capsys.readouterr().err
    assert "too many" in error
    assert "-m" in error
    assert "-p" in error


def test_a_prompt_in_the_place_of_the_model_is_told(capsys):
    assert main(["run", "What is the capital of France?"]) == 2
    error = capsys.readouterr().err
    assert "no such file" in error
    assert "first argument" in error


def test_the_context_bounds_prompt_and_answer(path, capsys):
    words = ["run", str(path), "-p", "aaaa", "--raw"]
    assert main([*words, "-c", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] + found["generated_tokens"] == 9 + 1  # the last token is in no cache
    assert found["finish_reason"] == "length"
    assert main([*words, "-c", "9"]) == 0
    assert "context of 9 tokens is full" in capsys.readouterr().err
    assert main([*words, "-c", "9", "-n", "2"]) == 0
    assert "full" not in capsys.readouterr().err
    for context, facts in (("3", ["tokens", "3", "--context"]), ("0", ["--context 0", "128"]), ("129", ["129", "128"])):
        assert main([*words, "-c", context]) == 2
        error = capsys.readouterr().err
        assert [fact for fact in facts if fact not in error] == []


def test_a_stop_text_ends_the_answer_before_it(path, capsys):
    words = ["run", str(path), "-p", "ab", "-n", "12", "--json", "--temperature", "0"]
    assert main(words) == 0
    whole = json.loads(capsys.readouterr().out)["text"]
    stop = next(character for character in whole[1:] if character != whole[0])
    assert main([*words, "--stop", "never in it", "--stop", stop]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"


def test_no_answer_has_no_rate(path, capsys):
    assert main(["run", str(path), "-p", "ab", "-n", "0"]) == 0
    error = capsys.readouterr().err
    assert "answer 0 tokens" in error
    assert "/s" not in error


# ---- threads --------------------------------------------------------------------------------------------------------


def test_more_threads_than_cores_get_a_warning(path, capsys, monkeypatch):
    before = _cpu.threads()
    monkeypatch.setattr("billfish.cli.model_arguments.allowed_cores", lambda: 2)
    try:
        for threads, warned in (("2", False), ("3", True)):
            assert main(["run", str(path), "-p", "ab", "-n", "1", "--threads", threads]) == 0
            error = capsys.readouterr().err
            assert ("--threads 3" in error and "2 CPU cores" in error) == warned
    finally:
        _cpu.set_threads(before)
