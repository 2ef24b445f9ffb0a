"""Runs Claude Code, Codex and OpenCode against the server: python tests/in_clients/coding_agents.py FOLDER [AGENT ...]

FOLDER: where npm has installed their packages. No model small enough for a test can drive an agent. So the model's part
is a script: it thinks, lists files, reads two at once, writes one, and says that it is done. Templates, tokens, readers
of thoughts and calls, APIs and streams are the server's own, and the agents execute the calls. --record FOLDER writes
the requests for tests/serving/api/test_recorded.py. Ends with 1 if an agent fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]
from run import different, recording, written  # noqa: E402
from serving_script import scripted  # noqa: E402

MOST_SECONDS = 240  # for one agent
ASKED = "Write c.py, which prints 3."
DONE = "All of it is done."
MOST_CHARACTERS = 60  # of a recorded text that is longer than twice that: the agents' prompts are their makers'
MOST_TOOLS = 6  # of a recorded request


@dataclass(frozen=True)
class Agent:
    """package: of npm. command: what comes behind the program's name. calls: those of each step of the script, in a
    folder. environment: from the server's address and the home folder, where it may write settings."""

    package: str
    program: str
    command: tuple[str, ...]
    calls: Callable[[Path], list[list[tuple[str, dict[str, Any]]]]]
    environment: Callable[[str, Path], dict[str, str]]


def claude_calls(folder: Path) -> list[list[tuple[str, dict[str, Any]]]]:
    write = {"file_path": str(folder / "c.py"), "content": "print(3)\n"}
    return [
        [("Bash", {"command": "ls", "description": "List files"})],
        [("Read", {"file_path": str(folder / name)}) for name in ("a.py", "b.py")],
        [("Write", write)],
    ]


def codex_calls(folder: Path) -> list[list[tuple[str, dict[str, Any]]]]:
    return [
        [("exec_command", {"cmd": "ls"})],
        [("exec_command", {"cmd": f"cat {name}"}) for name in ("a.py", "b.py")],
        [("multi_agent_v1__close_agent", {"target": "none"})],  # of a namespace; there is no such agent
        [("exec_command", {"cmd": "echo 'print(3)' > c.py"})],
    ]


def codex_gpt_calls(folder: Path) -> list[list[tuple[str, dict[str, Any]]]]:
    patch = "*** Begin Patch\n*** Add File: c.py\n+print(3)\n*** End Patch\n"
    return [*codex_calls(folder)[:2], [("apply_patch", {"input": patch})]]


def opencode_calls(folder: Path) -> list[list[tuple[str, dict[str, Any]]]]:
    return [
        [("bash", {"command": "ls", "description": "List files"})],
        [("read", {"filePath": str(folder / name)}) for name in ("a.py", "b.py")],
        [("write", {"filePath": str(folder / "c.py"), "content": "print(3)\n"})],
    ]


def claude_settings(url: str, home: Path) -> dict[str, str]:
    quiet = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", **dict.fromkeys(quiet, "1")}


def codex_settings(url: str, home: Path, model: str = "small") -> dict[str, str]:
    provider = f'[model_providers.local]\nname = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    (home / "config.toml").write_text(f'model = "{model}"\nmodel_provider = "local"\n{provider}')
    return {"CODEX_HOME": str(home)}


def opencode_settings(url: str, home: Path) -> dict[str, str]:
    model = {"name": "small", "tool_call": True, "reasoning": True, "limit": {"context": 200_000, "output": 8000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"small": model},
    }
    settings = {"autoupdate": False, "share": "disabled", "model": "local/small", "provider": {"local": provider}}
    (home / "opencode.json").write_text(json.dumps(settings))
    quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")
    folders = {f"XDG_{name}_HOME": str(home / name) for name in ("DATA", "CONFIG", "CACHE", "STATE")}
    disabled = dict.fromkeys((f"OPENCODE_DISABLE_{name}" for name in quiet), "1")
    return {"OPENCODE_CONFIG": str(home / "opencode.json"), **folders, **disabled}


CODEX = ("exec", "--dangerously-bypass-approvals-and-sandbox", ASKED)
AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        "claude",
        ("-p", ASKED, "--allowedTools", "Bash,Read,Write"),
        claude_calls,
        claude_settings,
    ),
    "codex": Agent(
        "@openai/codex",
        "codex",
        CODEX,
        codex_calls,
        codex_settings,
    ),
    # With the name of a model that it knows, it has tools of free text.
    "codex-gpt-5.5": Agent("@openai/codex", "codex", CODEX, codex_gpt_calls, partial(codex_settings, model="gpt-5.5")),
    "opencode": Agent("opencode-ai", "opencode", ("run", ASKED), opencode_calls, opencode_settings),
}


def script_of(steps: list[list[tuple[str, dict[str, Any]]]]) -> Callable[[str], str]:
    """What the model says, by the number of results that a prompt has."""

    def said(prompt: str) -> str:
        if '"type": "function"' not in prompt:
            return "<think>\n\n</think>\n\nThree"  # a title
        results = prompt.count("<tool_response>\n")
        for step in steps:
            if results <= 0:
                calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in step]
                written = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
                return f"<think>\nI call {step[0][0]}.\n</think>\n\nI call {step[0][0]}.\n\n{written}"
            results -= len(step)
        return f"<think>\nNothing is left.\n</think>\n\n{DONE}"

    return said


def scrubbed(seen: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Requests without what tells of the machine or of a run."""
    text = json.dumps(seen).replace(str(folder), "/home/me")
    for pattern, instead in (
        (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "00000000-0000-0000-0000-000000000000"),
        (r"[0-9a-f]{40,}", "0" * 64),
        (r"\d{4}-\d\d-\d\d", "2026-01-01"),
        (r"-home-me-[\w-]*", "-home-me-work"),
    ):
        text = re.sub(pattern, instead, text)
    return [_cut(each) for each in json.loads(text)]


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cut(each[:MOST_TOOLS] if key == "tools" else each) for key, each in value.items()}
    if isinstance(value, list):
        return [_cut(each) for each in value]
    return f"{value[:MOST_CHARACTERS]}..." if isinstance(value, str) and len(value) > 2 * MOST_CHARACTERS else value


def run_agent(programs: Path, name: str, record: Path | None) -> str:
    """What went wrong, or ""."""
    agent = AGENTS[name]
    with tempfile.TemporaryDirectory(dir=programs) as made:  # Codex refuses a home in /tmp
        home = Path(made)
        work = home / "work"
        work.mkdir()
        subprocess.run(["git", "init", "--quiet", str(work)], check=True)  # else a folder above is the project
        for file in ("a.py", "b.py"):
            (work / file).write_text(f"print('{file}')\n")
        script = script_of(agent.calls(work))
        with scripted(home, script) as server, recording(server.url) as recorder:
            settings = agent.environment(f"http://127.0.0.1:{recorder.server_address[1]}", home)
            command = [str(programs / "node_modules" / ".bin" / agent.program), *agent.command]
            try:
                ran = subprocess.run(
                    command,
                    cwd=work,
                    env={**os.environ, "HOME": made, "PWD": str(work), **settings},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=MOST_SECONDS,
                )
            except subprocess.TimeoutExpired as error:
                return f"took more than {MOST_SECONDS} s: {error.stderr!r:.2000}"
        written_file = work / "c.py"
        refused = [f"{each['path']} {each['status']}" for each in recorder.seen if each["status"] != 200]
        print(f"{name}: {len(recorder.seen)} requests {refused or ''}", flush=True)
        told = f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
        if record is not None:
            package = json.loads((programs / "node_modules" / agent.package / "package.json").read_text())
            posted = [each for each in scrubbed(recorder.seen, home) if each["method"] == "POST"]
            (record / f"{name}.json").write_text(written(name, package["version"], different(posted)))
        if ran.returncode or refused or DONE not in ran.stdout:
            return f"ended with {ran.returncode}, refused {refused}: {told}"
        if not written_file.exists() or written_file.read_text() != "print(3)\n":
            return f"c.py was not written: {told}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=Path, metavar="FOLDER")
    parser.add_argument("agents", nargs="*", default=list(AGENTS))
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.agents:
        problem = run_agent(arguments.programs.absolute(), name, arguments.record)
        print(f"{name}: {'FAILED ' + problem if problem else 'ok'}", flush=True)
        failed += bool(problem)
    print(f"{len(arguments.agents) - failed} of {len(arguments.agents)} agents work")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
