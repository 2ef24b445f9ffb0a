"""The table of architectures in docs/models.md says what the code says."""

from __future__ import annotations

import re

from pages import ROOT, page

from billfish.checkpoints.names.hyperparameters import ARCHITECTURE_OF
from billfish.llm.architectures import ARCHITECTURES, ATTENTION, Architecture

ORDINALS = {2: "second", 4: "fourth", 6: "sixth"}


def parts(row: Architecture) -> list[str]:
    """What an architecture has beside a Llama's parts, in words."""
    found = {
        "biases of q, k and v": row.biases == ATTENTION,
        "biases everywhere": len(row.biases) > len(ATTENTION),
        "norms of heads": row.head_norms == "each",
        "norms over all heads": row.head_norms == "all",
        "GELU": row.gate == "gelu",
        "clamped SwiGLU": row.gate == "clamped_silu",
        "scaled embedding": row.scaled_embedding,
        "norms behind both parts": row.post_norms,
        "attention sinks": row.sinks,
        "joined matrices": row.joined,
        "soft caps": any(row.caps),
    }
    words = [name for name, there in found.items() if there]
    if row.windows is not None:
        words.append(f"windows but in every {ORDINALS[row.windows.step]} layer" if row.windows.step else "windows")
        words += ["a rotary base for windows"] if row.windows.local_base else []
    if row.unrotated:
        words.append(f"no rotation in every {ORDINALS[row.unrotated]} layer")
    if row.routing is not None:
        words.append("experts" if row.routing.required else "experts or none")
        words += [] if row.routing.renormalized else ["routing weights as they are"]
        words += ["a shared expert"] if row.routing.shared else []
    return words or ["nothing"]


def test_the_table_of_architectures():
    section = page("docs/models.md").split("## Architectures")[1].split("\n## ")[0]
    rows = {
        row[0]: row[1:] for row in re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    }
    assert list(rows) == list(ARCHITECTURES)
    tested = (ROOT / "tests" / "support" / "llm_architectures.py").read_text()
    for name, (types, made_of, checked) in rows.items():
        assert re.findall(r"`(\w+)`", types) == [kind for kind, own in ARCHITECTURE_OF.items() if own == name]
        assert made_of == ", ".join(parts(ARCHITECTURES[name])), name
        for model in re.findall(r"`([\w-]+)`", checked):
            if not model.startswith("test_"):
                assert re.search(rf'^    "{model}": \(\s*"{name}",', tested, re.MULTILINE), model
