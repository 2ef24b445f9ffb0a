"""What all benchmarks share: options, turns, and records."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import command, records, timing

ROOT = Path(__file__).parents[2]
SHARED = {
    "__init__",
    "code_tables",
    "command",
    "machine",
    "pages",
    "promises",
    "random_model",
    "records",
    "serving_client",
    "serving_load",
    "tables",
}
SHARED |= {"timing"}
MODULES = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - SHARED)


@pytest.mark.parametrize("name", [*MODULES, "products", "metal_profile"])
def test_every_benchmark_has_help_and_the_same_options(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", ["-m", "--help"])
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m benchmarks.{name} ")
    assert "--json FILE" in said
    assert module.__doc__.splitlines()[0] in said


def test_options_end_with_their_defaults(capsys):
    made = command.parser(None, "", threads=2, rounds=3)
    made.listed("--formats", "formats", "q4_0,fp4")
    flags = made.parse_args([])
    assert (flags.threads, flags.rounds, flags.formats, flags.json) == (2, 3, ["q4_0", "fp4"], None)
    made.print_help()
    said = capsys.readouterr().out
    assert all(f"(default: {value})" in said for value in ("2", "3", "q4_0,fp4", "none"))


def test_contenders_take_turns_and_the_first_round_does_not_count(monkeypatch):
    clock, taken = [0.0], []

    def contender(name, *seconds):
        left = iter(seconds)

        def run():
            taken.append(name)
            clock[0] += next(left)

        return run

    def wait():
        taken.append("wait")
        clock[0] += 0.5

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    found = timing.medians({"a": contender("a", 9, 1, 2, 3), "b": contender("b", 9, 4, 4, 5)}, 3)
    assert found == {"a": 2, "b": 4}
    assert taken == ["a", "b"] * 4
    taken.clear()
    assert timing.medians({"a": contender("a", 9, 1)}, 1, wait=wait) == {"a": 1.5}
    assert timing.medians({"a": contender("a", 9, 1)}, 1, wait=wait, waits=False) == {"a": 1}
    assert taken == ["wait", "a", "wait"] * 2 + ["wait", "a"] * 2
    assert timing.best(contender("a", 9, 3, 1, 2), 3) == 1


def test_a_growing_record_knows_what_it_lacks(tmp_path):
    path = tmp_path / "record.json"
    growing = records.Growing(path, records=[])
    assert growing.lacks("records", {"format": "q4_0"})
    growing.add("records", {"format": "q4_0", "seconds": 1})
    again = records.Growing(path, records=[])
    assert not again.lacks("records", {"format": "q4_0"})
    assert again.lacks("records", {"format": "fp4"})
    found = json.loads(path.read_text())
    assert found["records"] == [{"format": "q4_0", "seconds": 1}]
    assert found["date"] == time.strftime("%Y-%m-%d")


def test_no_file_is_written_unless_one_is_asked_for(tmp_path):
    records.write(None, {})
    records.write(tmp_path / "record.json", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
