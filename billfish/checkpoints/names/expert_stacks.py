"""The experts of a model as stacks of matrices, whatever the layout: one name for each, and back to one matrix each.

    P.experts.gate_proj.weight, P.experts.up_proj.weight [E, I, H], P.experts.down_proj.weight [E, H, I]

is how `by_stacks` names them. It makes them of

    P.experts.3.gate_proj.weight [I, H]         a matrix for each expert; Mixtral's w1, w3 and w2 are gate, up and down
    P.experts.gate_up_proj [E, 2 I, H]          transformers' stacks, and Granite's P.input_linear.weight: gate above up
    P.experts.gate_up_proj_blocks               gpt-oss: rows of gate and up in turn; its plain stacks are [E, H, 2 I]
    P.switch_mlp.gate_proj.weight [E, I, H]     MLX

`one_by_one` gives each expert a matrix of its own, for layouts that have no stacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.derived import Joined, OneExpert, Renamed, SomeRows, Stacked, Turned
from billfish.checkpoints.entry import Entry
from billfish.checkpoints.safetensors_files import CALL
from billfish.core.errors import CheckpointError, bad_argument, failure
from billfish.models import Architecture
from billfish.models.architecture import EXPERT_COUNTS, ExpertFiles

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
GRANITE = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}

_ONE = re.compile(r"(.+\.experts)\.(\d{1,6})\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(weight|bias)")
_STACK = re.compile(
    r"(.+?)\.(?:(?:experts|switch_mlp)\.(gate_proj|up_proj|down_proj|gate_up_proj)|(input_linear|output_linear))"
    r"(?:\.weight|([._]bias))?"
)


def is_stack(name: str) -> bool:
    """Whether `by_stacks` calls a tensor so: a stack of experts, or their biases."""
    match = _STACK.fullmatch(name)
    return match is not None and match[2] in PROJECTIONS and name == _name(f"{match[1]}.experts", match[2], name)


def stacks_in(name: str) -> tuple[tuple[str, ...], int | None]:
    """Which stacks a tensor of experts holds, by the names of `by_stacks`: one, or gate and up; and the number of the
    expert that it holds of them, None for all. () for a tensor that is not called as experts are."""
    one, whole = _ONE.fullmatch(name), _STACK.fullmatch(name)
    if one is not None:
        return (_name(one[1], MIXTRAL.get(one[3], one[3]), name),), int(one[2])
    if whole is None:
        return (), None
    projection = whole[2] or GRANITE[whole[3]]
    parts = PROJECTIONS[:2] if projection == "gate_up_proj" else (projection,)
    return tuple(_name(f"{whole[1]}.experts", part, name) for part in parts), None


def by_stacks(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors with all experts as stacks. Headers only are read, and each stack when it is asked for.

    Raises CheckpointError where experts are missing or come twice, or differ in format or shape.
    """
    found: dict[str, tuple[str, Entry]] = {}
    matrices: dict[str, dict[int, str]] = {}  # by the name of the stack, and by the expert
    for name in checkpoint:
        stacks, e = stacks_in(name)
        if e is None:
            for new, entry in _stacks_of(name, checkpoint):
                _add(found, new, name, entry)
            continue
        [stack] = stacks
        if stack not in matrices:
            _add(found, stack, name, checkpoint.entry(name))  # its place; the whole stack follows
        members = matrices.setdefault(stack, {})
        if e in members:
            raise CheckpointError(failure(CALL, f"{name} and {members[e]} are the same expert {e}"))
        members[e] = name
    counts = _counts(checkpoint.config, matrices)
    for stack, members in matrices.items():
        found[stack] = found[stack][0], _merged(stack, members, counts[_block(stack)], checkpoint)
    entries = {new: entry for new, (_, entry) in found.items()}
    if list(entries) == list(checkpoint):
        return checkpoint
    return checkpoint.view(entries, [origin for origin, _ in found.values()])


def one_by_one(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors with a matrix for each expert, as most layouts have them."""
    if not any(len(checkpoint.describe(name).shape) == 3 and _STACK.fullmatch(name) for name in checkpoint):
        return checkpoint
    whole = by_stacks(checkpoint)
    short = {long: name for name, long in MIXTRAL.items()} if _files(checkpoint.config) == "mixtral" else {}
    entries, origins = dict[str, Entry](), list[str]()
    for name in whole:
        entry, (module, _, kind) = whole.entry(name), name.rpartition(".")
        if not is_stack(name):
            entries[name] = entry
            origins.append(whole.origins.get(name, name))
            continue
        block, _, projection = module.rpartition(".")
        for e in range(entry.description.shape[0]):
            new = f"{block}.{e}.{short.get(projection, projection)}.{kind}"
            entries[new] = OneExpert(entry, new, e)
            origins.append(whole.origins.get(name, name))
    return checkpoint.view(entries, origins)


def by_mlx_stacks(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors with all experts as stacks, as mlx-lm names them."""
    whole = by_stacks(checkpoint)
    if _files(checkpoint.config) == "gpt_oss":  # whose block is called `experts` there
        return whole
    entries, origins = dict[str, Entry](), list[str]()
    for name in whole:
        entry = whole.entry(name)
        new = name.replace(".experts.", ".switch_mlp.") if is_stack(name) else name
        entries[new] = entry if new == name else Renamed(entry, new)
        origins.append(whole.origins.get(name, name))
    return checkpoint if list(entries) == list(checkpoint) else checkpoint.view(entries, origins)


def by_transformers_stacks(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors with experts as transformers' files have them: of some models stacks, of most one by one."""
    files = _files(checkpoint.config)
    if files in ("apart", "mixtral"):
        return one_by_one(checkpoint)
    if not any(map(is_stack, checkpoint)):  # the names are those of such files
        return checkpoint
    gpt_oss, entries, origins = files == "gpt_oss", dict[str, Entry](), list[str]()
    for name in checkpoint:
        entry, new = checkpoint.entry(name), name
        match = _STACK.fullmatch(name) if is_stack(name) else None
        if match is not None and match[2] == "up_proj":
            continue  # with the gates
        if match is not None:
            projection = match[2].replace("gate_", "gate_up_")
            linear = next(theirs for theirs, ours in GRANITE.items() if ours == projection)
            bias = "_bias" if match[4] else ""
            granite = files == "granite"
            new = f"{match[1]}.{linear}.weight" if granite else f"{match[1]}.experts.{projection}{bias}"
            if match[2] == "gate_proj":
                entry = Joined(new, entry, checkpoint.entry(name.replace("gate_proj", "up_proj")), in_turn=gpt_oss)
            if entry.description.format is None and is_turned(new, checkpoint.config):
                entry = Turned(entry)  # as a quantized one will be when it is decoded
            entry = Renamed(entry, new)
        entries[new] = entry
        origins.append(checkpoint.origins.get(name, name))
    return checkpoint.view(entries, origins)


def is_turned(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a plain tensor of that name is a stack [E, K, N], as gpt-oss has them: x is multiplied from the left."""
    match = _STACK.fullmatch(name)
    bare = match is not None and bool(match[2]) and name.endswith("_proj")
    return bare and _files(config) == "gpt_oss"


def upright(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors, all plain stacks [E, N, K]: what can be quantized along K."""
    entries = {name: checkpoint.entry(name) for name in checkpoint}
    for name, entry in entries.items():
        about = entry.description
        if about.format is None and len(about.shape) == 3 and is_turned(name, checkpoint.config):
            entries[name] = Turned(entry)
    return checkpoint.view(entries, [checkpoint.origins.get(name, name) for name in entries])


def _stacks_of(name: str, checkpoint: Checkpoint) -> Iterator[tuple[str, Entry]]:
    """A tensor under the names of stacks; one that is no stack of experts as it is."""
    entry = checkpoint.entry(name)
    match, about = _STACK.fullmatch(name), entry.description
    axes = 2 if match is not None and match[4] else 3
    if match is None or len(about.shape) != axes:
        yield name, entry
        return
    parts, _ = stacks_in(name)
    in_turn = about.layout == "gpt-oss" or _files(checkpoint.config) == "gpt_oss"
    if about.format is None and axes == 3 and is_turned(name, checkpoint.config):
        entry = Turned(entry)
    if len(parts) == 1:
        [new] = parts
        yield new, entry if new == name and not isinstance(entry, Turned) else Renamed(entry, new)
        return
    if axes == 2 and "model_type" not in checkpoint.config:  # gpt-oss has such biases, in turn; nobody else has any yet
        problem = f"the row order of {name} is unknown without config.json"
        raise CheckpointError(failure(CALL, problem, "Put the model's config.json into its folder."))
    rows = entry.description.shape[1]
    if rows % 2:
        raise CheckpointError(bad_argument(CALL, f"number of rows of {name}", rows, "an even number, gate and up"))
    halves = (slice(0, None, 2), slice(1, None, 2)) if in_turn else (slice(0, rows // 2), slice(rows // 2, None))
    for half, new in zip(halves, parts, strict=True):
        yield new, SomeRows(entry, new, half)


def _files(config: Mapping[str, Any]) -> ExpertFiles:
    """How folders of a model have its experts."""
    known = (each.expert_files for each in Architecture.known if each.model_type == config.get("model_type"))
    return next(known, "apart")


def _name(block: str, projection: str, name: str) -> str:
    return f"{block}.{projection}.{'bias' if name.endswith('bias') else 'weight'}"


def _add(found: dict[str, tuple[str, Entry]], new: str, origin: str, entry: Entry) -> None:
    if new in found:
        raise CheckpointError(failure(CALL, f"{origin} and {found[new][0]} are both {new}"))
    found[new] = origin, entry


def _block(stack: str) -> str:
    return stack.rsplit(".", 2)[0]


def _counts(config: Mapping[str, Any], matrices: Mapping[str, Mapping[int, str]]) -> dict[str, int]:
    """How many experts each block must have: what the configuration says, or the most that a stack of it has."""
    declared = next((config[name] for name in EXPERT_COUNTS if type(config.get(name)) is int and config[name] > 0), 0)
    counts: dict[str, int] = {}
    for stack, members in matrices.items():
        counts[_block(stack)] = declared or max(counts.get(_block(stack), 0), max(members) + 1)
    return counts


def _merged(stack: str, members: Mapping[int, str], count: int, checkpoint: Checkpoint) -> Entry:
    """One stack of all experts."""
    listed = f"{', '.join(map(str, sorted(members)[:8]))}{', ...' if len(members) > 8 else ''}"
    if len(members) != count or max(members) != count - 1:
        problem = f"{stack} has {len(members)} experts ({listed})"
        raise CheckpointError(failure(CALL, problem, f"Expected all {count}, 0 to {count - 1}."))
    return Stacked(stack, [checkpoint.entry(members[e]) for e in range(count)])
