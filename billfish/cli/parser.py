"""The argument parser of all commands: no abbreviations, one line of usage, and hints for options that others have."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

GPU = "Use --device cuda, which puts all layers on the GPU, or --device cpu."
CHAT = "Leave out the prompt: `billfish run MODEL` in a terminal is a chat."
DOWNLOAD = "billfish downloads nothing. Run: hf download ORG/NAME --local-dir DIR"
# Options of llama.cpp, and what to type instead. Many would be read as one of our one-letter options with a value.
OTHERS = {
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), GPU),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), CHAT),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo", "-mu", "--model-url"), DOWNLOAD),
    **dict.fromkeys(("-no-cnv", "--no-conversation"), "Use --raw."),
    **dict.fromkeys(("-np", "--parallel"), "Use --streams N."),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "Use --cache-type float16, int8 or fp8."),
    **dict.fromkeys(("--n-predict", "--predict", "--max-new-tokens"), "Use -n N."),
    **dict.fromkeys(("-sys", "--system-prompt"), "Use --system TEXT."),
    **dict.fromkeys(("-s", "--rng-seed"), "Use --seed S."),
    **dict.fromkeys(("-b", "-ub", "--batch-size", "--ubatch-size"), "Leave it out: billfish chooses the batch size."),
    **dict.fromkeys(("-fa", "--flash-attn"), "Leave it out: there is one kind of attention."),
    **dict.fromkeys(("-tb", "--threads-batch"), "Use --threads N."),
    "--ctx-size": "Use -c N.",
    "--jinja": "Leave it out: the chat template is always used.",
    "--repeat-penalty": "Use --repetition-penalty R.",
    "--temp": "Use --temperature T.",
}


class Parser(argparse.ArgumentParser):
    """argparse's, with options and positional arguments in any order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; of an unknown option, the error names the nearest one that exists."""
        words = list(args)
        options = words[: words.index("--")] if "--" in words else words
        for word in options:
            name = word.partition("=")[0]
            if name in OTHERS and name not in self._option_string_actions:
                self.error(f"there is no option {name}. {OTHERS[name]}")
        mixed = any(action.nargs in ("?", "*") for action in self._get_positional_actions())
        parse = self.parse_known_intermixed_args if mixed else self.parse_known_args
        found, unknown = parse(words, namespace)
        if unknown:
            self.error(self._about(unknown))
        return found

    def _about(self, unknown: Sequence[str]) -> str:
        option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
        if option is None:
            return f"there is one argument too many: {unknown[0]!r}"
        near = difflib.get_close_matches(option, self._option_string_actions, 1)
        return f"there is no option {option}." + (f" Did you mean {near[0]}?" if near else "")

    def error(self, message: str) -> NoReturn:
        """One line of usage, where the options are listed, and the message."""
        self.exit(2, f"{self.format_usage()}`{self.prog} --help` lists the options.\n{self.prog}: error: {message}\n")
