"""The other libraries that `python -m benchmarks.products` knows, one adapter a file, and which of them are to run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.base import Case, Peer, Prepared, copies_for
from benchmarks.peers.ggml import Ggml
from benchmarks.peers.mlx import Mlx
from benchmarks.peers.numpy import Numpy
from benchmarks.peers.onnxruntime import OnnxRuntime
from billfish.core.errors import BackendUnavailable

__all__ = ["PEERS", "Case", "Peer", "Prepared", "copies_for", "select"]

PEERS: tuple[Peer, ...] = (OnnxRuntime(), Ggml(repack=False), Ggml(repack=True), Mlx(), Numpy())


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
            raise BackendUnavailable(f"--peers: unknown peer {name!r}. Known: all, none, {', '.join(families)}.")
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
