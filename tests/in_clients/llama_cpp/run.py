"""llama.cpp's server tests against `billfish serve`: python tests/in_clients/llama_cpp/run.py SDIST FOLDER [TEST ...]

SDIST: of llama-cpp-python, which has llama.cpp's source. Only its tests and chat templates are unpacked, to FOLDER. The
tests run as llama.cpp wrote them, but for how the server starts (serve.py), and for what only their own model says:
of texts it is checked only that there is one (`match_regex`), of the parameters `n_prompt` and `batch_count` (into how
many batches of --batch-size a prompt of their tokenizer is cut) only that the number is positive.
Tests that needed that are counted as relaxed. Ends with 1 unless exactly the tests of refused.json fail.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tarfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

from requests.structures import CaseInsensitiveDict

HERE = Path(__file__).resolve().parent
REFUSED = HERE / "refused.json"  # tests that fail, and why
COUNTS = {"n_prompt", "batch_count"}  # parameters that follow from the tokenizer
MODEL = "model: "  # begins the reason of a test that needs a model that cannot be had
# Of OpenAI's API, tokenizing, templates, tools, security and embeddings. The others test what only llama-server has.
FILES = (
    "chat_completion",
    "completion",
    "compat_oai_responses",
    "compat_anthropic",
    "tokenize",
    "template",
    "tool_call",
    "security",
    "embedding",
    "rerank",
)


def unpack(sdist: Path, folder: Path) -> None:
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/vendor/llama.cpp/")[2]
            if member.isfile() and name.startswith(("tools/server/tests/", "models/templates/")):
                member.name = name
                archive.extract(member, folder, filter="data")


class Results:
    """A plugin of pytest: what depends on a model is compared less strictly, and results are kept."""

    def __init__(self) -> None:
        self.found = dict[str, tuple[str, str]]()  # of each test: passed, relaxed, failed, skipped; and why
        self._relaxed = set[str]()  # of the test that runs

    def patch(self, utils: Any) -> None:
        """utils: llama.cpp's module."""
        match, relaxed = utils.match_regex, self._relaxed

        def match_regex(regex: str, text: str) -> bool:
            if match(regex, text):
                return True
            relaxed.add("text")
            return bool(text)

        class Count(int):
            def __eq__(self, other: object) -> bool:
                if int(self) != other:
                    relaxed.add("number of tokens")
                return isinstance(other, int) and other > 0

            __hash__ = int.__hash__

        ask = utils.ServerProcess.make_request

        def make_request(*arguments: Any, **named: Any) -> Any:
            response = ask(*arguments, **named)
            response.headers = CaseInsensitiveDict(response.headers)  # HTTP/1.1 and uvicorn know no case
            return response

        utils.ServerProcess.make_request = make_request
        utils.match_regex, self._count = match_regex, Count
        utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would fetch every model

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            for name in COUNTS & parameters.keys():
                parameters[name] = self._count(parameters[name])

    def pytest_runtest_setup(self, item: Any) -> None:
        self._relaxed.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.removeprefix("unit/test_")
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.found[name] = ("failed", crash.message.partition("\n")[0] if crash else str(report.longrepr)[-300:])
        elif report.skipped:
            self.found[name] = ("skipped", report.longrepr[2])
        elif report.when == "call":
            self.found[name] = ("relaxed" if self._relaxed else "passed", ", ".join(sorted(self._relaxed)))


def run(folder: Path, only: list[str]) -> dict[str, tuple[str, str]]:
    """What became of the tests in FOLDER."""
    import pytest

    os.environ["STAND_INS"] = str(folder / "stand-ins")
    os.environ["LLAMA_SERVER_BIN_PATH"] = "billfish"
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["PORT"] = str(free.getsockname()[1])
    os.chdir(folder / "tools/server/tests")
    sys.path.insert(0, os.getcwd())
    sys.modules["wget"] = types.ModuleType("wget")  # for models of a hub
    import serve
    import utils

    results = Results()
    results.patch(utils)
    utils.subprocess = types.SimpleNamespace(Popen=serve.ServerProcess, TimeoutExpired=subprocess.TimeoutExpired)
    options = [
        "-c",
        "pytest.ini",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-q",
        "--tb=short",
        "--rootdir=.",
    ]
    pytest.main([*options, *(only or [f"unit/test_{name}.py" for name in FILES])], plugins=[results])
    serve.ServerProcess.end_kept()
    return results.found


def summary(found: dict[str, tuple[str, str]], refused: dict[str, str]) -> str:
    """In how many tests the server does what llama-server does, for each file."""
    lines = list[str]()
    for name in (*FILES, ""):
        tests = {test: result for test, (result, _) in found.items() if test.startswith(f"{name}.py" if name else "")}
        missing = [test for test in tests if refused.get(test, "").startswith(MODEL)]
        passed = [test for test, result in tests.items() if result in ("passed", "relaxed")]
        relaxed = sum(result == "relaxed" for result in tests.values())
        run = sum(result != "skipped" for result in tests.values()) - len(missing)
        share = f"{len(passed)} of {run} ({100 * len(passed) / max(1, run):.0f} %)"
        lines.append(f"{name or 'all'}: {share}, {relaxed} of them relaxed; {len(missing)} need a model")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="*", metavar="TEST", help="as pytest takes them (default: those of FILES)")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if not (folder / "tools/server/tests").exists():
        unpack(given.sdist, folder)
    found = run(folder, given.only)
    (folder / "results.json").write_text(json.dumps(found, indent=1))
    print(dict(Counter(result for result, _ in found.values())))
    if given.only:
        return any(result == "failed" for result, _ in found.values())
    refused = json.loads(REFUSED.read_text())
    wrong = [name for name, (result, _) in found.items() if (result == "failed") != (name in refused)]
    for name in wrong:
        print(f"{name}: {found[name][0]}, {found[name][1] or 'which refused.json does not expect'}")
    print(summary(found, refused))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
