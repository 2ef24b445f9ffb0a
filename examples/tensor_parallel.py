"""One model over several processes: each reads its share of the checkpoint, and all compute the same answer.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py FOLDER_OR_GGUF "1 5 7 9"

The second argument is a prompt in token ids. With GPUs each process takes one; otherwise they are CPU processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

from billfish.nn.transformers import load_model


def main(arguments: Sequence[str]) -> None:
    path, prompt = arguments
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))  # starts the process group too
    model = load_model(path, mesh=mesh).to(device)
    tokens = torch.tensor([[int(token) for token in prompt.split()]], device=device)
    answer = model.generate(tokens, max_new_tokens=8, do_sample=False)
    if mesh.get_local_rank() == 0:
        held = sum(buffer.nbytes for buffer in model.buffers()) + sum(p.nbytes for p in model.parameters())
        print(f"{mesh.size()} processes, {held / 1e6:.1f} MB in this one: {answer[0].tolist()}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
