"""Which tensors of a checkpoint are quantized, and to which format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, NamedTuple, Protocol

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.mixes import Mix
from billfish.checkpoints.names.gguf_names import is_of_images, text_config
from billfish.checkpoints.write.pattern_trial import SECONDS, endless_pattern
from billfish.checkpoints.write.target import is_sensitive
from billfish.core.errors import CheckpointError, failure
from billfish.core.format import Format
from billfish.models import MODEL_TYPES
from billfish.models.difference import Order
from billfish.ops.quantization import sent_for_gptq

# Tensors of three axes that are quantized: the experts of a model. Others may be convolutions.
EXPERTS = re.compile(r"(^|\.)(experts|switch_mlp|block_sparse_moe)\.|_exps\.")


class InputKnowledge(Protocol):
    """What is known of the inputs of matrices; :class:`billfish.statistics.Statistics`, a floor above, is one."""

    @property
    def digest(self) -> str: ...
    def check_model(self, call: str, architecture: str, names: Iterable[str]) -> None: ...
    def check_matrix(self, call: str, name: str, shape: Sequence[int], method: str) -> None: ...
    def settings(
        self,
        call: str,
        name: str,
        shape: Sequence[int],
        method: str,
        expert: int | None = None,
        columns: Order | None = None,
    ) -> tuple[str, dict[str, Any]]: ...


class Rule(NamedTuple):
    """A format for the tensors that a pattern finds; None leaves them as they are."""

    pattern: re.Pattern[str]
    format: Format | None
    group_size: int | None


@dataclass(frozen=True)
class Quantization:
    """How to quantize: the format for ordinary weights, rules that come first, and patterns for the only ones."""

    format: Format
    group_size: int | None
    method: str
    rules: tuple[Rule, ...] = ()
    only: tuple[re.Pattern[str], ...] = ()
    mix: Mix | None = None  # whose rules come after these
    statistics: InputKnowledge | None = None  # of the inputs that weights are multiplied with
    planned: tuple[Rule, ...] = ()  # further rules, for what `only` finds
    columns: Mapping[str, Order] = field(default_factory=dict, compare=False)  # of the checkpoint; see `column_orders`
    gptq_device: str = "cpu"  # where "gptq" runs: torch's name of a device
    finished: Checkpoint | None = field(default=None, compare=False)  # of the output, what is quantized already

    def choice(self, name: str, origin: str, shape: tuple[int, ...]) -> tuple[Format, int | None] | None:
        """The format of a tensor; None to leave it as it is. Patterns are for its name, or the one it had."""
        if self.reason_to_leave(name, origin, shape):
            return None
        rule = self._rule(name, origin)
        return (self.format, self.group_size) if rule is None or rule.format is None else (rule.format, rule.group_size)

    def reason_to_leave(self, name: str, origin: str, shape: tuple[int, ...]) -> str:
        """Why a tensor is left as it is; "" for one that is to be quantized."""
        rule = self._rule(name, origin)
        if rule is not None:
            return f"kept by the rule '{rule.pattern.pattern}'" if rule.format is None else ""
        if not self.is_wanted(name, origin):
            return "not matched by `only`"
        if not self.only and is_of_images(origin):
            return "of images or sound; `keep` or `only` chooses a format"
        if is_sensitive(name):
            return "not quantized by default (embeddings, LM head, norms, routers); --keep REGEX=FORMAT quantizes them"
        if len(shape) == 3 and EXPERTS.search(name):
            return ""
        if len(shape) > 2:
            return "more than two axes, and not experts; `keep` chooses a format"
        if len(shape) < 2:
            return "not a matrix"
        return "" if name.endswith("weight") else "not called `weight`; `keep` chooses a format"

    def check_statistics(self, checkpoint: Checkpoint) -> None:
        """Raises if there are statistics of another model."""
        if self.statistics is not None:
            kind = text_config(checkpoint.config).get("model_type")  # a folder's, also where it is seen as a GGUF file
            architecture = MODEL_TYPES.get(str(kind)) or checkpoint.metadata.get("general.architecture", "")
            self.statistics.check_model("quantize", str(architecture), checkpoint)

    def settings(self, name: str, shape: tuple[int, ...], expert: int | None = None) -> tuple[str, dict[str, Any]]:
        """The method for a tensor, and what is known of its inputs; raises if that is of another model."""
        if self.statistics is None:
            return self.method, {}
        method, known = self.statistics.settings("quantize", name, shape, self.method, expert, self.columns.get(name))
        if self.gptq_device != "cpu":
            there: dict[str, Any] = {
                what: sent_for_gptq("quantize", known[what], self.gptq_device)
                for what in ("hessian", "cross")
                if what in known
            }
            known = {**known, **there}
        return method, known

    def is_wanted(self, name: str, origin: str) -> bool:
        """Whether `only` finds a tensor, or there is none."""
        return not self.only or any(finds(pattern, name, origin) for pattern in self.only)

    def _rule(self, name: str, origin: str) -> Rule | None:
        rules = (*self.rules, *self.planned) if self.is_wanted(name, origin) else self.rules
        return next((rule for rule in rules if finds(rule.pattern, name, origin)), None)

    def check_patterns(self, checkpoint: Checkpoint) -> None:
        """Raises if a pattern finds no tensor: a misspelt rule must not be silently without effect. Raises, too, if it
        takes too long to find them."""
        origins = {name: checkpoint.origins.get(name, name) for name in checkpoint}
        patterns = [("keep", rule.pattern) for rule in (*self.rules, *self.planned)] + [
            ("only", pattern) for pattern in self.only
        ]
        endless = endless_pattern([pattern.pattern for _, pattern in patterns], {*origins, *origins.values()})
        if endless is not None:
            problem = f"the regular expression {endless!r} takes more than {SECONDS:g} s for the names of the tensors"
            fix = "It repeats what repeats, such as (a*)*. Write each repetition once."
            raise CheckpointError(failure("quantize", problem, fix))
        for argument, pattern in patterns:
            if not any(finds(pattern, *names) for names in origins.items()):
                problem = f"{argument} is {pattern.pattern!r}, which matches no tensor"
                raise CheckpointError(failure("quantize", problem, _examples(pattern.pattern, origins)))


def finds(pattern: re.Pattern[str], name: str, origin: str) -> bool:
    """Whether a pattern is for a tensor, under its name or the one it had."""
    return bool(pattern.search(name) or pattern.search(origin))


def _examples(pattern: str, names: Iterable[str], count: int = 3) -> str:
    """The names that look most like a pattern."""
    alike = sorted(names, key=lambda name: -SequenceMatcher(None, pattern, name).ratio())
    return f"Close names: {', '.join(alike[:count])}."
