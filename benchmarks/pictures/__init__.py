"""The pictures of docs/pictures, each drawn from records or from the code: `python -m benchmarks.pages` writes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.pictures import charts, diagrams, formats, layouts
from benchmarks.pictures.svg import Drawing

PICTURES: dict[str, Callable[[], Drawing]] = {
    "data-path": diagrams.data_path,
    "formats": formats.draw,
    "cpu-stream": layouts.cpu_stream,
    "cuda-bricks": layouts.cuda_bricks,
    "request": diagrams.request,
    "rooms": diagrams.rooms,
    "token-gpu": charts.token_gpu,
    "token-cpu": charts.token_cpu,
    "speed": charts.speed,
    "roofline-cpu": partial(
        charts.cpu_roofline,
        "cpu_neoverse_n1.json",
        ("q4_0", "q8_0", "q4_k", "mxfp4"),
        "Matmul on an Arm CPU beside its roofline and peers",
    ),
    "roofline-xeon": partial(
        charts.cpu_roofline,
        "cpu_xeon_avx512_2_threads.json",
        ("q4_0", "q8_0"),
        "Matmul on a Xeon beside its roofline and onnxruntime",
    ),
    "roofline-gpu": charts.gpu_roofline,
    "kl": charts.kl,
    "sweep": charts.sweep,
}
