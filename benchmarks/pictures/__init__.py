"""The pictures of docs/pictures, each drawn from records or from the code: `python -m benchmarks.pages` writes them."""

from __future__ import annotations

from collections.abc import Callable

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
    "roofline-cpu": charts.cpu_roofline,
    "roofline-gpu": charts.gpu_roofline,
    "kl": charts.kl,
}
