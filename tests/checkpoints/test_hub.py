"""Models by name, against a Hub on localhost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_samples import gguf_file
from hub_server import COMMIT, HubServer, serve_hub
from llm_models import Small, write_model
from serving_http import process, send

import billfish as bf
from billfish.checkpoints.hub import HubName, choose_files, fetch_model, is_hub_name, parse_name, quant_of
from billfish.cli.main import main

LARGE = bytes(range(256)) * 4096  # a megabyte
FILES = {
    "anna/tiny-GGUF": {
        "tiny-Q4_K_M.gguf": b"GGUF four",
        "tiny-Q8_0.gguf": LARGE,
        "mmproj-tiny-Q8_0.gguf": b"pictures",
        "Q6_K/tiny-Q6_K-00001-of-00002.gguf": b"first",
        "Q6_K/tiny-Q6_K-00002-of-00002.gguf": b"second",
        "README.md": b"hello",
    },
    "anna/tiny": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model-00001-of-00002.safetensors": b"one",
        "model-00002-of-00002.safetensors": b"two",
        "consolidated.safetensors": b"all again",
        "README.md": b"hello",
        "onnx/model.onnx": b"x",
    },
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    constants = pytest.importorskip("huggingface_hub.constants")
    with serve_hub({name: dict(files) for name, files in FILES.items()}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hf:a/b", ("a/b", None, None)),
        ("hf://a/b", ("a/b", None, None)),
        ("hf.co/a/b:q4_0", ("a/b", None, "q4_0")),
        ("https://huggingface.co/a/b-1.5_x/", ("a/b-1.5_x", None, None)),
        ("hf:a/b@v1.0:UD-Q4_K_XL", ("a/b", "v1.0", "UD-Q4_K_XL")),
    ],
)
def test_names(name: str, parts: tuple[str, str | None, str | None]) -> None:
    assert is_hub_name(name)
    assert parse_name("load", name) == HubName(*parts)


@pytest.mark.parametrize("name", ["hf:b", "hf:a/b/c", "hf:a/b:", "hf:", "hf:../b c"])
def test_wrong_names(name: str) -> None:
    with pytest.raises(bf.CheckpointError, match=r"load: .*hf:USER/MODEL"):
        parse_name("load", name)


def test_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf.co" / "a" / "b").mkdir(parents=True)
    assert [is_hub_name(path) for path in ("model.gguf", Path("hf:a/b"), None, "hf.co/a/b")] == [False] * 4


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_0.gguf", "Q4_0"),
        ("UD-IQ2_XXS/model-UD-IQ2_XXS-00001-of-00003.gguf", "UD-IQ2_XXS"),
        ("BF16/model-00001-of-00002.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model.gguf", ""),
        ("SmolLM2-135M-F16.gguf", "F16"),
    ],
)
def test_quants(file: str, quant: str) -> None:
    assert quant_of(file) == quant


def chosen(quant: str | None, *files: str) -> list[str]:
    return choose_files("load", HubName("a/b", None, quant), files)


def test_choice_of_files() -> None:
    assert chosen(None, "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf") == ["m-Q4_K_M.gguf"]
    assert chosen("q8_0", "m-Q8_0.gguf", "m-Q4_K_M.gguf") == ["m-Q8_0.gguf"]
    assert chosen("Q4_K_XL", "m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf") == ["m-UD-Q4_K_XL.gguf"]
    assert chosen(None, "model.gguf", "mmproj-model-f16.gguf", "imatrix.gguf") == ["model.gguf"]
    parts = [f"m-Q4_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert chosen(None, *reversed(parts)) == parts


@pytest.mark.parametrize(
    ("quant", "files", "facts"),
    [
        ("Q2_K", ["m-Q8_0.gguf", "m-F16.gguf"], ["no Q2_K", "F16, Q8_0", "hf:a/b:QUANT"]),
        (None, ["m-F16.gguf", "m-BF16.gguf"], ["several", "BF16, F16"]),
        ("Q8_0", ["m-Q8_0.gguf", "n-Q8_0.gguf"], ["several", "n-Q8_0.gguf", "hf download"]),
        (None, ["m-Q4_0-00001-of-00002.gguf"], ["1 of 2 parts"]),
        (None, ["README.md", "model.onnx"], ["neither GGUF nor safetensors"]),
        ("Q4_0", ["model.safetensors", "config.json"], ["safetensors", "--quantize"]),
    ],
)
def test_nothing_to_choose(quant: str | None, files: list[str], facts: list[str]) -> None:
    with pytest.raises(bf.CheckpointError) as error:
        chosen(quant, *files)
    assert [fact for fact in facts if fact not in str(error.value)] == []


def test_one_file_is_downloaded_once(hub: HubServer) -> None:
    path = fetch_model("load", "hf:anna/tiny-GGUF")
    assert (path.name, path.read_bytes()) == ("tiny-Q4_K_M.gguf", b"GGUF four")
    assert fetch_model("load", "hf.co/anna/tiny-GGUF:Q4_K_M") == path
    assert hub.downloads() == ["tiny-Q4_K_M.gguf"]


def test_parts_of_a_split_file_lie_beside_each_other(hub: HubServer) -> None:
    path = fetch_model("load", f"hf:anna/tiny-GGUF@{COMMIT}:Q6_K")
    assert path.name == "tiny-Q6_K-00001-of-00002.gguf"
    assert path.with_name("tiny-Q6_K-00002-of-00002.gguf").read_bytes() == b"second"


def test_a_folder_has_weights_and_what_belongs_to_them(hub: HubServer) -> None:
    folder = fetch_model("load", "hf:anna/tiny")
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_cut_download_continues(hub: HubServer) -> None:
    hub.cut["tiny-Q8_0.gguf"] = 300_000
    path = fetch_model("load", "hf:anna/tiny-GGUF:Q8_0")
    assert path.read_bytes() == LARGE
    ranges = [range for method, name, range in hub.requests if method == "GET" and name.endswith("Q8_0.gguf")]
    assert ranges[0] == ""
    assert ranges[-1] == "bytes=300000-"


def test_damaged_bytes_are_refused_and_not_kept(hub: HubServer) -> None:
    hub.damaged.add("tiny-Q8_0.gguf")
    with pytest.raises(bf.CheckpointError, match=r"tiny-Q8_0\.gguf .*checksum"):
        fetch_model("load", "hf:anna/tiny-GGUF:Q8_0")
    hub.damaged.clear()
    assert fetch_model("load", "hf:anna/tiny-GGUF:Q8_0").read_bytes() == LARGE


def test_what_the_hub_refuses(hub: HubServer) -> None:
    hub.gated.add("anna/secret")
    for name, facts in {
        "hf:anna/none": ["no model anna/none", "hf auth login"],
        "hf:anna/secret": ["gated", "https://huggingface.co/anna/secret"],
        "hf:anna/tiny@v9": ["anna/tiny", "'v9'"],
    }.items():
        with pytest.raises(bf.CheckpointError) as error:
            bf.llm.load(name)
        assert [fact for fact in ["llm.load: ", *facts] if fact not in str(error.value)] == []


def test_offline_takes_the_cache(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    path = fetch_model("load", "hf:anna/tiny-GGUF")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert fetch_model("load", "hf:anna/tiny-GGUF") == path
    with pytest.raises(bf.CheckpointError, match=r"no Q8_0.*Q4_K_M"):
        fetch_model("load", "hf:anna/tiny-GGUF:Q8_0")
    with pytest.raises(bf.CheckpointError, match=r"anna/tiny .*HF_HUB_OFFLINE"):
        fetch_model("load", "hf:anna/tiny")
    assert len(hub.requests) == before


def test_without_a_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(bf.CheckpointError, match=r"anna/tiny could not be downloaded: .*again"):
        fetch_model("load", "hf:anna/tiny")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(bf.BackendUnavailable, match=r"pip install '\.\[hub\]'"):
        fetch_model("load", "hf:anna/tiny")


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, dict[str, bytes]]:
    """The name of a model that answers, and the files of its repository."""
    write_model(tmp_path / "small.gguf", Small())
    files = {"small-Q8_0.gguf": (tmp_path / "small.gguf").read_bytes(), "small-Q4_0.gguf": b"GGUF, but no model"}
    return "hf:anna/small-GGUF:Q8_0", files


def test_load_and_run_by_name(
    hub: HubServer, small: tuple[str, dict[str, bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, hub.repositories["anna/small-GGUF"] = small
    model, local = bf.llm.load(name), bf.llm.load(tmp_path / "small.gguf")
    text = "".join(local.generate("ab", max_tokens=3, temperature=0))
    assert "".join(model.generate("ab", max_tokens=3, temperature=0)) == text
    assert main(["run", name, "-p", "ab", "-n", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert hub.downloads() == ["small-Q8_0.gguf"]


@pytest.mark.process
def test_serve_by_name(small: tuple[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub({"anna/small-GGUF": small[1]}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        with process(small[0]) as (_, url):
            status, _, answer = send(url, "/v1/completions", {"prompt": "ab", "max_tokens": 3, "temperature": 0})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        assert server.downloads() == ["small-Q8_0.gguf"]


def test_inspect_by_name(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf_file(tmp_path / "m-Q8_0.gguf")
    hub.repositories["anna/m"] = {"m-Q8_0.gguf": (tmp_path / "m-Q8_0.gguf").read_bytes()}
    assert main(["inspect", "hf.co/anna/m"]) == 0
    assert "format" in capsys.readouterr().out
