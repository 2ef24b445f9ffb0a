"""A block of experts on the GPU, and the same rows through the dense kernels: the table of docs/cuda.md.

Weights are random, made on the GPU, of Mixtral's shape, and larger than the L2 cache. A contender is a CUDA graph of
several calls, each with another routing; graphs take turns, and the median counts. Dense: as many rows as tokens have
visits, through one matrix of gate and up, with its gate, and one of down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks import command, machine, records
from benchmarks.cuda_products import U4B8, random_weights, stream
from benchmarks.timing import captured, graph_medians
from billfish.backends.cuda import experts
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.experts import NOTHING, DeviceExperts, Numbers, Visits
from billfish.backends.cuda.memory import TorchRoom
from billfish.backends.cuda.plans import ExpertRouting, Gemm

EXPERTS, CHOSEN, HIDDEN, INNER = 8, 2, 4096, 14336
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
BYTES_PER_WEIGHT = U4B8.brick_bytes / (16 * 128)
BANDWIDTH, TENSOR = 4.0e12, 650e12  # bytes and operations in a second, as the dense kernels reach them


def random_experts(n: int, k: int, gated: bool) -> DeviceExperts:
    whole = random_weights(U4B8, k, EXPERTS * n)  # N is a multiple of eight courses, so bricks lie as those of a stack
    return DeviceExperts(U4B8, (EXPERTS, n, k), whole.bricks, whole.row_scale, gated)


def expert(stack: DeviceExperts, e: int) -> DeviceWeights:
    """One matrix of a stack, on the same memory."""
    _, n, k = stack.shape
    alone = random_weights(U4B8, k, 16)
    bricks = stack.bricks.view(EXPERTS, -1)[e]
    return replace(alone, about=replace(alone.about, shape=(n, k)), bricks=bricks, row_scale=stack.row_scale[: 4 * n])


def predicted(tokens: int) -> float:
    """Milliseconds: the longer of reading the weights of the experts that are visited, and multiplying."""
    visits, weights = tokens * CHOSEN, 3 * HIDDEN * INNER
    busy = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** tokens)
    reading = busy * weights * BYTES_PER_WEIGHT / BANDWIDTH
    return 1e3 * max(reading, 2 * visits * weights / TENSOR)


class Case:
    """So many tokens, each with experts of its own; `calls` routings."""

    def __init__(self, tokens: int, gate_up: DeviceExperts, down: DeviceExperts, calls: int) -> None:
        self.tokens, self.gate_up, self.down, self.calls = tokens, gate_up, down, calls
        generator = np.random.default_rng(tokens)
        order = generator.random((calls, tokens, EXPERTS)).argsort(axis=2)[..., :CHOSEN]
        self.ids = torch.from_numpy(order.astype(np.int32)).cuda()
        self.weights = torch.rand((tokens, CHOSEN), device="cuda")
        self.x = (torch.randn((tokens, HIDDEN), device="cuda") * 0.05).half()
        self.y = torch.empty_like(self.x)
        self.room = TorchRoom(0)

    def visits(self, i: int) -> Visits:
        ids = Numbers(self.ids[i % self.calls].data_ptr(), "int32")
        return Visits(self.room, ExpertRouting(self.tokens, CHOSEN, EXPERTS), ids, False)

    def block(self, i: int) -> None:
        x, weights = Numbers(self.x.data_ptr(), "float16", HIDDEN), Numbers(self.weights.data_ptr(), "float32")
        stacks = self.gate_up, self.down
        experts.launch_block(
            self.visits(i), x, [stacks[0]], stacks[1], "silu", [NOTHING], NOTHING, weights, self.y.data_ptr()
        )

    def dense(self) -> Any:
        rows = self.tokens * CHOSEN
        x = (torch.randn((rows, HIDDEN), device="cuda") * 0.05).half()
        opened = torch.empty((rows, INNER), device="cuda", dtype=torch.float16)
        y = torch.empty_like(x)
        matrices = [(expert(self.gate_up, e), expert(self.down, e)) for e in range(EXPERTS)]
        first = Gemm(U4B8, rows, 2 * INNER, HIDDEN, gate="silu")
        second = Gemm(U4B8, rows, HIDDEN, INNER)

        def run(i: int) -> None:
            gate_up, down = matrices[i % EXPERTS]
            assert gate_up.multiply(stream(), first, x.data_ptr(), HIDDEN, 0, opened.data_ptr())
            assert down.multiply(stream(), second, opened.data_ptr(), INNER, 0, y.data_ptr())

        return run

    def error(self) -> float:
        """Of some tokens against float64."""
        self.y.fill_(float("nan"))
        self.block(0)
        some = list(range(0, self.tokens, max(1, self.tokens // 4)))
        worst = 0.0
        for t in some:
            exact = torch.zeros(HIDDEN, dtype=torch.float64, device="cuda")
            for j in range(CHOSEN):
                e = int(self.ids[0, t, j])
                both = decoded(expert(self.gate_up, e)) @ self.x[t].double()
                gate, up = both.view(-1, 2, 8).unbind(1)
                h = torch.nn.functional.silu(gate) * up
                exact += self.weights[t, j].double() * (decoded(expert(self.down, e)) @ h.ravel())
            worst = max(worst, float((self.y[t].double() - exact).norm() / exact.norm()))
        return worst

    def measure(self) -> dict[str, Any]:
        error = self.error()
        assert error < 2e-3, (self.tokens, error)
        contenders = {"experts": captured(self.calls, self.block), "dense": captured(self.calls, self.dense())}
        seconds = graph_medians(contenders, self.calls)
        milliseconds, dense = 1e3 * seconds["experts"], 1e3 * seconds["dense"]
        print(
            f"{self.tokens:5} tokens: {milliseconds:.4f} ms, predicted {predicted(self.tokens):.4f}, "
            f"dense {dense:.4f} ({milliseconds / dense:.2f}), error {error:.1e}",
            flush=True,
        )
        return {
            "tokens": self.tokens,
            "seconds": seconds["experts"],
            "seconds_dense": seconds["dense"],
            "seconds_predicted": predicted(self.tokens) / 1e3,
            "relative_error": error,
        }


def decoded(weights: DeviceWeights) -> Any:
    out = torch.empty(weights.shape, dtype=torch.float32, device="cuda")
    weights.dequantize(stream(), "float32", out.data_ptr())
    return out.double()


def main() -> None:
    flags = command.parser(__spec__, __doc__).parse_args()
    gate_up, down = random_experts(2 * INNER, HIDDEN, True), random_experts(HIDDEN, INNER, False)
    found = [Case(tokens, gate_up, down, 16 if tokens <= 256 else 4).measure() for tokens in TOKENS]
    shape = {"experts": EXPERTS, "chosen": CHOSEN, "hidden": HIDDEN, "inner": INNER, "format": "u4b8:128"}
    about = {"machine": machine.gpu(), "versions": machine.versions("torch"), "shape": shape}
    records.write(flags.json, about | {"records": found})


if __name__ == "__main__":
    main()
