"""benchmarks.products --backend metal --report FILE: what the file holds, and that it says where it was made."""

from __future__ import annotations

import io
import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest
from bench_support import parsed

import billfish as bf
from benchmarks import products
from benchmarks.machine import GpuLimits
from benchmarks.products import main, report
from billfish.core.errors import BackendUnavailable
from billfish.nn.torch import emulated_mps

FIELDS = {"report", "emulated", "machine", "versions", "notes", "checks", "times", "counts", "limits", "complete"}
SMALL = ["--backend", "metal", "--formats", "q4_1", "--shapes", "512x96", "--m", "1"]


PAGE = (Path(__file__).parents[2] / "docs" / "first-hour-on-a-mac.md").read_text()


def test_the_page_has_two_commands_that_exist():
    lines = re.findall(r"^python -m benchmarks.products (.*)$", PAGE, re.MULTILINE)
    assert [len(products.parse(products.parser(), shlex.split(line)).cases) for line in lines] == [1, 14]


def test_the_page_names_every_field_of_the_file():
    rows = PAGE.split("| field | is |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert {row.split("`")[1] for row in rows} == FIELDS


def test_the_page_shows_the_table_of_checks():
    shown = PAGE.split("beside exact ones:\n\n")[1].split("\n\n")[0]
    made = report.MacReport(True, {}, {}, [], [], [], [])
    for line in shown.splitlines()[1:]:
        bridge, format, m, error, allowed, verdict = line.split()
        record = {"bridge": bridge, "format": format, "m": int(m), "right": verdict == "right"}
        made.checks.append(record | {"error": float(error), "allowed": float(allowed)})
        assert 0 < float(error) <= float(allowed)
    out = io.StringIO()
    report.print_checks(made, out)
    assert textwrap.dedent(shown).strip() == "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_the_example_of_the_page(capsys, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    with emulated_mps.mps():
        exec(example, names)
        assert names["y"].device.type == "mps"
    assert capsys.readouterr().out.startswith("2 layers, 3 products, ")


@pytest.fixture
def no_metal(monkeypatch):
    monkeypatch.setattr(report, "has_metal", lambda: False)


def test_in_the_emulator_the_file_says_so(no_metal, tmp_path, capsys):
    path = tmp_path / "mac.json"
    main([*SMALL, "--report", str(path)])
    content = json.loads(path.read_text())
    assert content.keys() == FIELDS
    assert content["emulated"] is True
    assert content["notes"] == [report.EMULATED]
    assert content["limits"] is None
    assert content["complete"]
    assert content["machine"]["cpu"]
    assert content["versions"]["billfish"] == bf.__version__
    assert {(record["bridge"], record["m"]) for record in content["checks"]} == {
        (bridge, m) for bridge in ("mlx", "torch") for m in report.CHECKED_ROWS
    }
    assert all(record["right"] and 0 < record["error"] <= record["allowed"] for record in content["checks"])
    (time,) = content["times"]
    assert time.pop("seconds") > 0
    assert time == {"backend": "metal-emulator", "format": "q4_1", "m": 1, "k": 512, "n": 96, "peers": {}}
    counts = {record["owner"]: record for record in content["counts"]}
    assert counts["billfish"]["cycles_per_weight"] > 0
    assert counts["billfish"]["estimated_us"].keys() == {"M1", "M1 Max", "M2", "M2 Max"}
    printed = capsys.readouterr()
    assert printed.err == f"{report.EMULATED}\n"
    assert printed.out.endswith(f"report: {path}\n")


def wrong(x, q):
    return x @ bf.dequantize(q, "float16").T * 1.01


def broken(x, q):
    raise RuntimeError("no such function\nin the library")


def test_what_is_wrong_or_broken_is_in_the_file(no_metal, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "bridges", lambda emulated: {"mlx": wrong, "torch": broken})
    monkeypatch.setattr(report, "counted", lambda cases, rows: iter(()))
    path = tmp_path / "mac.json"
    with pytest.raises(SystemExit) as caught:
        main([*SMALL, "--report", str(path)])
    assert caught.value.code == 1
    content = json.loads(path.read_text())
    assert not content["complete"]
    first, *_, last = content["checks"]
    assert (first["bridge"], first["right"]) == ("mlx", False)
    assert first["error"] > first["allowed"]
    assert last == {
        "bridge": "torch",
        "format": "q4_1",
        "m": 20,
        "right": False,
        "failed": "RuntimeError: no such function\nin the library",
    }
    assert "RuntimeError: no such function" in capsys.readouterr().out


def test_large_products_are_not_run_in_the_emulator(no_metal):
    cases = parsed(backend="metal", formats="q4_1", shapes="4096x14336").cases
    notes = []
    assert list(report.emulated_times(cases, [512], notes)) == []
    assert notes == ["q4_1 4096x14336 M=512: too large to run all of it in the emulator"]


class Timed:
    """A run of `bench` on a Mac."""

    error: Exception | None = None

    def __init__(self, settings):
        self.settings = settings
        limits = GpuLimits(1e9, 4e9, 4e9)
        self.report = products.Report({"gpu": "Apple M0"}, {}, limits, False, [], [])

    def run(self):
        if self.error is not None:
            raise self.error
        case = self.settings.cases[0]
        sizes = {"format": case.label, "activations": "exact", "m": 1, "k": case.k, "n": case.n}
        figures = {"seconds": 1e-4, "gops": 1.0, "weight_gbps": 1.0, "limit_fraction": 0.5, "peers": {"mlx": 2e-4}}
        errors = {"error": (1e-4, 1e-4), "peer_errors": {"mlx": (2e-4, 2e-4)}}
        self.report.records.append({"backend": "metal", **sizes, **figures, **errors})
        self.report.complete = True


@pytest.mark.parametrize("error", [None, RuntimeError("[metal::Device] Unable to build metal library")])
def test_on_a_mac(tmp_path, monkeypatch, capsys, error):
    monkeypatch.setattr(report, "has_metal", lambda: True)
    monkeypatch.setattr(report, "bridges", lambda emulated: {} if not emulated else pytest.fail("emulated"))

    def no_compiler(cases, rows):
        raise BackendUnavailable("no clang")
        yield

    monkeypatch.setattr(report, "counted", no_compiler)
    monkeypatch.setattr(Timed, "error", error)
    monkeypatch.setattr(products, "Bench", Timed)
    path = tmp_path / "mac.json"
    settings = parsed(backend="metal", formats="q4_1", shapes="512x96", m="1", report=path)
    made = report.run(settings, io.StringIO())
    content = json.loads(path.read_text())
    assert (content["emulated"], content["complete"], made.complete) == (False, error is None, error is None)
    assert content["machine"]["gpu"] == "Apple M0"
    assert content["limits"]["read_bytes_per_second"] == 1e9
    assert [record["peers"] for record in content["times"]] == ([] if error else [{"mlx": 2e-4}])
    notes = [f"times end here: RuntimeError: {error}"] if error else []
    assert content["notes"] == [*notes, "nothing was counted: no clang"]


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--formats", "nf4", "--report", "x.json"], ["no kernels for the nf4"]),
        (["--report", "/no/such/x"], ["--report", "'/no/such/x'", "folder that exists"]),
    ],
)
def test_refusals(flags, facts, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["--backend", "metal", *flags])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(fact in last for fact in facts), last
    assert list(tmp_path.iterdir()) == []
