"""The other libraries that `billfish bench` knows, one adapter a file, and which of them are to run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.products.peers.base import Case, Peer, Prepared, copies_for
from benchmarks.products.peers.ggml import Ggml
from benchmarks.products.peers.mlx import Mlx
from benchmarks.products.peers.numpy import Numpy
from benchmarks.products.peers.onnxruntime import OnnxRuntime
from benchmarks.products.peers.torch import Torch
from billfish.core.errors import BackendUnavailable, complaint

__all__ = ["PEERS", "Case", "Peer", "Prepared", "copies_for", "select"]

PEERS: tuple[Peer, ...] = (OnnxRuntime(), Ggml(repack=False), Ggml(repack=True), Torch(), Mlx(), Numpy())


def select(names: str, peers: Sequence[Peer] = PEERS) -> tuple[list[Peer], list[str]]:
    """The peers for `--peers`, loaded, and a line about each that is not there.

    "all" takes what is installed; a peer asked for by name must be.
    """
    if names == "none":
        return [], []
    families = list(dict.fromkeys(peer.family for peer in peers))
    wanted = families if names == "all" else names.split(",")
    chosen: list[Peer] = []
    missing: dict[str, None] = {}
    for name in wanted:
        if name not in families:
            takes = f"all, none, or some of {', '.join(families)}"
            raise BackendUnavailable(complaint("bench", "--peers", repr(name), takes))
        for peer in peers:
            if peer.family != name or peer in chosen:
                continue
            try:
                peer.load()
            except BackendUnavailable as error:
                if names != "all":
                    raise
                missing[str(error)] = None
            else:
                chosen.append(peer)
    return chosen, list(missing)
