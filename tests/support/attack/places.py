"""Paths that are no regular files, and folders of an unfinished output whose plan.json is odd."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
from pathlib import Path

import billfish as bf
from attack.cases import Case, as_json, odd_json, odd_text, read_all, run_model
from attack.folders import CONFIG, tokenizer, use_tokenizer, weights
from attack.gguf_files import collection

KINDS = ("pipe", "folder", "socket", "zero", "tty", "dangling", "loop", "empty", "itself")
ATTEMPTS = {
    "m.gguf": read_all,
    "m-00001-of-00002.gguf": read_all,
    "model.safetensors": run_model,
    "model.safetensors.index.json": run_model,
    "config.json": run_model,
    "tokenizer.json": run_model,
    "tokenizer_config.json": use_tokenizer,
    "chat_template.jinja": use_tokenizer,
    "packed.npz": bf.PackedWeights.load,
}


def put(path: Path, kind: str) -> None:
    """Something at this path instead of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
            listener.bind(str(path))
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        targets = {"zero": "/dev/zero", "tty": "/dev/tty", "dangling": "nothing", "loop": path.name, "itself": "."}
        path.symlink_to(targets[kind])


def places(rng: random.Random) -> Case:
    """A pipe, device, socket, folder or link where a file should be."""
    name, kind = rng.choice(list(ATTEMPTS)), rng.choice(KINDS)
    files = {"tokenizer.json": as_json(tokenizer()), "tokenizer_config.json": b"{}"}
    if name.endswith(".gguf"):
        files = {"m-00002-of-00002.gguf": collection(rng).bytes()}
    elif ATTEMPTS[name] is run_model:
        files |= {"config.json": as_json(CONFIG), "model.safetensors": weights()}
    whole = name.startswith(("m.", "m-", "packed")) or (name == "model.safetensors" and rng.random() < 0.5)

    def attempt(folder: Path) -> None:
        put(folder / name, kind)
        ATTEMPTS[name](folder / name if whole else folder)

    return Case(f"{kind} as {name}", files, attempt)


def plans(rng: random.Random) -> Case:
    """An unfinished output of somebody: it is refused and left, or it is ours and continued."""
    plan = {
        "billfish": "plan of an unfinished output",
        "files": [["model.safetensors", 10]],
        "small": {"config.json": "x"},
        "settings": {},
    }
    text = json.dumps(odd_json(plan, rng), sort_keys=True).encode("utf-8", "surrogatepass")
    files = {"in/model.safetensors": weights(), "in/config.json": as_json(CONFIG)}
    files["out.partial/plan.json"] = odd_text(text, rng)
    if rng.random() < 0.5:
        files[f"out.partial/output/{rng.choice(['model.safetensors', 'config.json', 'x'])}"] = b"0123456789"
    if rng.random() < 0.1:
        del files["out.partial/plan.json"]
        files["out.partial/x"] = b""

    def attempt(folder: Path) -> None:
        bf.convert(folder / "in", folder / "out", "billfish", progress=False)
        assert set(bf.load(folder / "out")) == set(bf.load(folder / "in"))

    return Case("plan.json", files, attempt)
