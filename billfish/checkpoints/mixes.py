"""Mixes: formats for the tensors of a model, chosen as llama.cpp's `quantize` chooses them, such as Q4_K_M.

A mix is one format for most matrices, and more bits where errors cost most: the values of attention and the last matrix
of feed-forward blocks, in some layers or all, and the output. It goes by llama.cpp's names of tensors and by shapes. A
row that is no multiple of 256 has no k-quant, and gets a format in blocks of 32 instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from billfish.checkpoints.names.gguf_names import gguf_name, is_gguf_name
from billfish.core.errors import CheckpointError, FormatError, did_you_mean, failure
from billfish.core.format import FORMATS, Format, get_format

MIX_NAME = re.compile(r"i?q\d_k_(xxs|xs|s|m|l|xl|xxl)")
Shapes = Mapping[str, tuple[int, ...]]
TIED_OUTPUT, OUTPUT, EMBEDDING = "q6_k", "output.weight", "token_embd.weight"
VALUES = ("attn_v", "attn_qkv", "attn_kv_b")  # the values of attention, alone or in one matrix with others
# For rows that end inside of a block of 256.
IN_BLOCKS_OF_32 = {
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "iq4_xs": "iq4_nl",
}
# Matrices that stay as they are: norms, what chooses experts, positions, and small ones of recurrent models.
NEVER = re.compile(
    r"_norm\.weight$|ffn_gate_inp\.|^position_embd\.|^token_types\.|ssm_conv1d|shortconv\.conv|time_mix_"
)


class Some(NamedTuple):
    """A format for the layers that `where(layer, layers)` finds; the others have the mix's own, or `elsewhere`."""

    format: str
    where: Callable[[int, int], bool]
    elsewhere: str = ""


def everywhere(layer: int, layers: int) -> bool:
    return True


def first_eighth(layer: int, layers: int) -> bool:
    return layer < layers // 8


def outer_and_each_third(layer: int, layers: int) -> bool:
    """The first and the last eighth, and every third layer between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


class ModelShape(NamedTuple):
    """What a mix must know of a model."""

    layers: int
    shared: int  # heads of queries that share one head of keys and values
    experts: int
    tied: bool  # whether the embedding is the output, too


@dataclass(frozen=True)
class Mix:
    """A mix by its name in llama.cpp."""

    name: str
    file_type: int  # llama.cpp's number, in `general.file_type`
    format: str  # of most matrices
    values: Some | None = None  # for attn_v
    down: Some | None = None  # for ffn_down
    joined: str = ""  # for attn_output
    shared_values: str = ""  # for attn_v, where four heads or more share one
    joined_with_8_experts: str = ""  # for attn_output

    def assign(self, shapes: Shapes) -> dict[str, str]:
        """The format of each tensor that is quantized. Names are llama.cpp's."""
        model = model_of(shapes)
        chosen = {}
        for name, shape in shapes.items():
            if len(shape) >= 2 and name.endswith("weight") and not NEVER.search(name):
                chosen[name] = self._fitting(self._choose(name, shape[-1], model), shape[-1])
        return chosen

    def rules(self, call: str, shapes: Shapes, wanted: Iterable[str]) -> list[tuple[re.Pattern[str], Format, None]]:
        """The same for wanted tensors, as one pattern for each format. Names are those of llama.cpp or transformers."""
        known = {name: name if is_gguf_name(name) else gguf_name(name) for name in shapes}
        strange = [name for name, theirs in known.items() if theirs is None and len(shapes[name]) >= 2]
        if strange:
            problem = f"the mix {self.name} has no rule for the tensor {strange[0]!r}, which llama.cpp does not know"
            raise CheckpointError(failure(call, problem, "Use a single format, such as q4_k."))
        chosen = self.assign({theirs: shapes[name] for name, theirs in known.items() if theirs is not None})
        names: dict[str, list[str]] = {}
        for name in wanted:
            if (theirs := known[name]) in chosen:
                names.setdefault(chosen[theirs], []).append(name)
        return [(_any_of(same), get_format(format), None) for format, same in names.items()]

    def _choose(self, name: str, k: int, model: ModelShape) -> str:
        if name == OUTPUT or (name == EMBEDDING and model.tied):
            return "q8_0" if k % get_format(self.format).block_size else TIED_OUTPUT
        match = re.fullmatch(r"blk\.(\d{1,9})\.(\w+)\.weight", name)
        if not match:
            return self.format
        layer, module = int(match[1]), match[2]
        if module in VALUES:
            return self._for_values(layer, model)
        if module == "attn_k" and model.experts == 8:
            return "q8_0"
        if module.startswith("ffn_down"):
            return self._some(self.down, layer, model)
        if module == "attn_output":
            return (self.joined_with_8_experts if model.experts == 8 else self.joined) or self.format
        return self.format

    def _for_values(self, layer: int, model: ModelShape) -> str:
        if model.experts == 8:
            return "q8_0"
        shared = self.shared_values and model.shared >= 4
        format = self.shared_values if shared else self._some(self.values, layer, model)
        is_70b = model.layers == 80 and model.shared > 1
        return "q5_k" if is_70b and format in ("q3_k", "q4_k") else format

    def _some(self, some: Some | None, layer: int, model: ModelShape) -> str:
        if some is None:
            return self.format
        return some.format if some.where(layer, model.layers) else some.elsewhere or self.format

    def _fitting(self, format: str, k: int) -> str:
        return format if k % get_format(format).block_size == 0 else IN_BLOCKS_OF_32.get(format, format)


def model_of(shapes: Shapes) -> ModelShape:
    """What names and shapes say of a model."""
    layers = {int(match[1]) for name in shapes if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    rows = {part: shapes.get(f"blk.{min(layers, default=0)}.attn_{part}.weight", (1,))[0] for part in "qv"}
    stacks = [shape[0] for name, shape in shapes.items() if "_exps." in name and len(shape) == 3]
    return ModelShape(
        max(layers, default=-1) + 1, rows["q"] // max(1, rows["v"]), max(stacks, default=0), OUTPUT not in shapes
    )


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"^(?:{'|'.join(map(re.escape, names))})$")


MIXES = {
    mix.name.lower(): mix
    for mix in (
        Mix(
            "Q2_K",
            10,
            "q2_k",
            values=Some("q3_k", everywhere),
            down=Some("q3_k", everywhere),
            joined="q3_k",
            shared_values="q4_k",
            joined_with_8_experts="q5_k",
        ),
        Mix("Q3_K_S", 11, "q3_k", joined_with_8_experts="q5_k"),
        Mix(
            "Q3_K_M",
            12,
            "q3_k",
            values=Some("q5_k", lambda layer, layers: layer < 2, "q4_k"),
            down=Some("q5_k", lambda layer, layers: layer < layers // 16, "q4_k"),
            joined="q4_k",
            joined_with_8_experts="q5_k",
        ),
        Mix("Q3_K_L", 13, "q3_k", Some("q5_k", everywhere), Some("q5_k", everywhere), joined="q5_k"),
        Mix(
            "Q4_K_S",
            14,
            "q4_k",
            values=Some("q5_k", lambda layer, layers: layer < 4),
            down=Some("q5_k", first_eighth),
            joined_with_8_experts="q5_k",
        ),
        Mix(
            "Q4_K_M",
            15,
            "q4_k",
            values=Some("q6_k", outer_and_each_third),
            down=Some("q6_k", outer_and_each_third),
            joined_with_8_experts="q5_k",
        ),
        Mix("Q5_K_S", 16, "q5_k"),
        Mix("Q5_K_M", 17, "q5_k", Some("q6_k", outer_and_each_third), Some("q6_k", outer_and_each_third)),
        Mix("Q6_K", 18, "q6_k"),
        Mix(
            "IQ4_XS",
            30,
            "iq4_xs",
            down=Some("q5_k", first_eighth),
            shared_values="q5_k",
            joined_with_8_experts="q5_k",
        ),
    )
}
# llama.cpp's numbers of files in one format or type; of k-quants that of the mix with the fewest others.
FILE_TYPES = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 32,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q2_k": 10,
    "q3_k": 11,
    "q4_k": 14,
    "q5_k": 16,
    "q6_k": 18,
    "iq4_nl": 25,
    "iq4_xs": 30,
    "mxfp4_gguf": 38,
    "nvfp4_gguf": 39,
}


def mix_named(name: str, to: str, call: str = "quantize") -> Mix | None:
    """The mix of that name, in any case. Q2_K, Q6_K and IQ4_XS are formats, too, and a mix in GGUF files alone.

    Raises for a name that looks like a mix and is none of ours.
    """
    known = name.lower()
    if MIX_NAME.fullmatch(known) and known not in MIXES:
        mixes = [mix.name for mix in MIXES.values()]
        near = did_you_mean(name, [*mixes, *FORMATS])
        hint = f"{near} The mixes are {', '.join(mixes)}. `billfish formats` lists the formats.".lstrip()
        raise FormatError(failure(call, f"unknown format {name!r}", hint))
    return MIXES.get(known) if to == "gguf" or known not in FORMATS else None
