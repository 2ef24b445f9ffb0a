"""What `--bits` gives the parts of a mixture of experts that every token uses, and what that is worth.

A small mixture with shared experts (transformers' Qwen2MoeForCausalLM, byte tokens) is trained on Python's
documentation for some minutes: random weights would tell nothing. `--bits` then plans it, and predictions of held-out
documentation are compared with the trained model's, with the plan and with one format for all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import billfish as bf
from benchmarks import command, pages, records
from benchmarks.quality import calibration_text
from billfish.checkpoints.tokenizer.tokenizer import byte_characters
from billfish.core.files import write_atomically
from billfish.llm import load
from billfish.llm.evaluation import Truth, evaluate
from billfish.quantizing.sensitivity import FORMATS, plan_bits, role_of

RESULTS = records.RESULTS / "mixture_bits.json"
CONTEXT, BATCH, HELD_OUT = 128, 16, 4096  # tokens, texts of a step, tokens to predict
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "max_position_embeddings": 512,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": True,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def write_tokenizer(folder: Path) -> int:
    """A token for each byte, with two control tokens before them. Returns how many there are."""
    pieces = ["<s>", "</s>", *byte_characters()]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": piece, "special": True, **plain} for i, piece in enumerate(pieces[:2])]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": []}
    content = {"added_tokens": added, "normalizer": None, "pre_tokenizer": bytes_, "decoder": bytes_, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(pieces)


def train(folder: Path, text: str, steps: int) -> float:
    """Write a trained mixture; returns the mean loss of the last tenth of all steps."""
    import torch
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder)
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=vocabulary, bos_token_id=0, eos_token_id=1, **SIZES))
    place = {byte: 2 + i for i, byte in enumerate(byte_characters().values())}
    tokens = torch.tensor([place[byte] for byte in text.encode()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,))
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return float(np.mean(losses[-max(1, steps // 10) :]))


def measured(folder: Path, seen: str, text: str, flags: argparse.Namespace) -> dict[str, Any]:
    """The plan, made on a text that was `seen` in training, and the bits of each role in it. Divergences are on another
    text, with the plan and with one format for all."""
    model, known = folder / "model.gguf", folder / "seen.txt"
    bf.convert(folder, model, "gguf", overwrite=True, progress=False)
    known.write_text(seen)
    original = load(model, device=flags.device, progress=False)
    truth = Truth(original, original.tokenizer.encode(text, special=False)[:HELD_OUT])
    plan = plan_bits(model, flags.bits, text=known, device=flags.device)
    files: dict[str, tuple[str, dict[str, str]]] = {f"--bits {flags.bits:g}": (plan.format, plan.keep)}
    files |= {format: (format, {}) for format in FORMATS}
    found = []
    for name, (format, keep) in files.items():
        out = folder / "quantized.gguf"
        bf.quantize_checkpoint(model, out, format, keep=keep, overwrite=True, progress=False)
        quantized = load(out, device=flags.device, progress=False)
        lost = evaluate(quantized, [token for window in truth.windows for token in window], against=truth)
        found.append(
            {
                "name": name,
                "bits_per_weight": quantized.decoder.tensors.bits_per_weight,
                "roles": bits_by_role(out),
                "divergence": lost.divergence,
                "divergence_error": lost.divergence_error,
            }
        )
    return {"plan": plan.text(), "tokens": lost.tokens, "records": found}


def bits_by_role(path: Path) -> dict[str, float]:
    """Mean bits per quantized weight of attention, shared experts and experts."""
    checkpoint, sums = bf.open_checkpoint(path), dict[str, list[int]]()
    for name in checkpoint:
        about = checkpoint.describe(name)
        if about.format is not None and name.startswith("blk."):
            weights = int(np.prod(about.shape))
            known = sums.setdefault(role_of(name.split(".")[2]), [0, 0])
            known[0], known[1] = known[0] + 8 * about.nbytes, known[1] + weights
    return {role: bits / weights for role, (bits, weights) in sums.items()}


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.option("--steps", "steps of training, of 2048 tokens", 600, command.positive, "N")
    parser.add_argument("--bits", type=float, default=4.75, metavar="B", help="bits of the plan (default: 4.75)")
    parser.add_argument("--folder", type=Path, help="folder that keeps the trained model (default: none)")
    parser.option("--device", "cpu, cuda or cuda:N; auto is a GPU if there is one", "auto", str, "D")
    flags = parser.parse_args()
    text = calibration_text("documentation")
    learned, held = text[: -4 * HELD_OUT], text[-4 * HELD_OUT :]
    with tempfile.TemporaryDirectory() as temporary:
        folder, started = Path(flags.folder or temporary), time.perf_counter()
        if not (folder / "model.safetensors").exists():
            trained = {"steps": flags.steps, "loss": train(folder, learned, flags.steps)}
            write_atomically(folder / "training.json", json.dumps(trained).encode())
            print(f"loss {trained['loss']:.3f} after {time.perf_counter() - started:.0f} s", flush=True)
        about = {"sizes": SIZES, **json.loads((folder / "training.json").read_text())}
        found = about | measured(folder, learned[-4 * HELD_OUT :], held, flags)
    for record in found["records"]:
        roles = ", ".join(f"{role} {bits:.2f}" for role, bits in record["roles"].items())
        lost = f"{record['divergence']:.4f} ± {record['divergence_error']:.4f}"
        print(f"{record['name']}: {record['bits_per_weight']:.2f} bits ({roles}), KL {lost}")
    records.write(flags.json, found)
    if flags.json == RESULTS:
        pages.main()


if __name__ == "__main__":
    main()
