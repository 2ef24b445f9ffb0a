"""A part of the attack of tests/attack: some cases of each generator, and every file that once did harm."""

from __future__ import annotations

import random
import sys

import pytest
from attack import faults, folders, gguf_files, guided, run
from attack.cases import Case, as_json, read_all, run_model
from attack.findings import FINDINGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
CASES = 12


@pytest.mark.promise("inputs", "loading allocates at most 64 MB plus 8 times the file")
@pytest.mark.parametrize("generator", run.GENERATORS)
def test_hostile_inputs_are_refused_or_harmless(generator):
    """No crash, no hang, no memory beyond what the files justify, no error but ours."""
    (row,) = run.attack(CASES, 1, generator)
    assert not row.failures
    assert (row.cases, row.accepted + row.refused) == (CASES, CASES)
    assert row.refused  # a generator that breaks nothing is no test


@pytest.mark.promise("inputs", "inputs that once crashed or hung are kept as regression tests")
@pytest.mark.promise("inputs", "sums that a file could only hold as infinity are refused")
@pytest.mark.parametrize("name", FINDINGS)
def test_what_once_did_harm_does_none(name, tmp_path):
    make, refused = FINDINGS[name]
    result = run.attempted(make(), tmp_path)
    assert (result["outcome"], result["failure"]) == ("refused" if refused else "accepted", "")


@pytest.mark.parametrize(
    ("generator", "seed"), [("safetensors layouts", 3867), ("mutated files", 81727), ("gguf models", 14709)]
)
def test_seeds_that_once_failed(generator, seed, tmp_path):
    """An array without axes, and a signaling NaN in an imatrix file: errors of NumPy came. A name of many NULs, whose
    message had 6,000 characters."""
    assert run.one_case(generator, seed, tmp_path)["failure"] == ""


def test_what_the_generators_break_was_whole(tmp_path):
    """Else all would be refused for another reason."""
    for seed in range(10):
        rng = random.Random(seed)
        (tmp_path / "c.gguf").write_bytes(gguf_files.collection(rng).bytes())
        read_all(tmp_path / "c.gguf")
        (tmp_path / "m.gguf").write_bytes(gguf_files.model(rng).bytes())
        run_model(tmp_path / "m.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(folders.weights())
    (folder / "config.json").write_bytes(as_json(folders.CONFIG))
    (folder / "tokenizer.json").write_bytes(as_json(folders.tokenizer()))
    run_model(folder)


@pytest.mark.parametrize("kind", guided.SUFFIXES)
def test_files_that_reached_new_lines_are_refused_or_harmless(kind, tmp_path):
    files = sorted((guided.CORPUS / kind).iterdir())
    assert len(files) > 10
    for file in files:
        name = f"file{guided.SUFFIXES[kind]}"
        case = Case(file.name, {name: file.read_bytes()}, lambda folder, name=name: guided.attempt(kind)(folder / name))
        result = run.attempted(case, tmp_path)
        assert not result["failure"], file.name


@pytest.mark.promise(
    "files", "a call that fails with EIO or ENOSPC, once or for good, or half a write, leaves no half output"
)
def test_disks_that_fail_leave_no_half_output():
    """EIO and ENOSPC at random calls, and a process that is killed within a write."""
    row = faults.faults(6)
    assert row.failures == []
    assert row.cases >= 6
    assert row.refused


def bare_error(folder):
    raise TypeError("of somebody else")


def much_memory(folder):
    assert bytearray(b"x") * (200 << 20)


@pytest.mark.parametrize(("attempt", "failure"), [(bare_error, "TypeError"), (much_memory, "MB for 0 bytes")])
def test_harm_is_noticed(tmp_path, attempt, failure):
    assert failure in run.attempted(Case("harm", {}, attempt), tmp_path)["failure"]


@pytest.mark.parametrize(
    ("harm", "failure"), [("import os; os.abort()", "ended with -6"), ("import time; time.sleep(60)", "no end after")]
)
def test_a_worker_that_ends_or_hangs_is_noticed(monkeypatch, tmp_path, harm, failure):
    """The case counts as failed, and the next worker goes on behind it."""
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nif sys.argv[3] == '0':\n    {harm}\n")
    monkeypatch.setattr(run, "__file__", str(script))
    monkeypatch.setattr(run, "PATIENCE", 2.0)
    first, second = run.watched("calls", 0, 2)
    assert (first["seed"], failure in first["failure"]) == (0, True)
    assert (second["seed"], "ended with 0" in second["failure"]) == (1, True)
