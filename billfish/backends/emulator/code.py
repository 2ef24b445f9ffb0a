"""LLVM's intermediate code as text: its functions, their blocks, and what each instruction takes and gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_FUNCTION = re.compile(r'^define .*?@"?(?P<name>[\w.$]+)"?\(.* #(?P<attributes>\d+)')
_ATTRIBUTES = re.compile(r"^attributes #(\d+) = \{(.*)\}")
_LABEL = re.compile(r'^(?:[\w.$-]+|"[^"]*"):')
_RESULT = re.compile(r'^(%(?:[\w.$-]+|"[^"]*")) = ')
_VALUE = re.compile(r'%(?:[\w.$-]+|"[^"]*")')
_DEBUG = re.compile(r"(?:, ![a-z.]+ ![0-9]+)+$")
_FLAGS = re.compile(
    r"^(?:(?:nsw|nuw|exact|disjoint|nneg|inbounds|nusw|samesign|contract|nsz|arcp|afn|reassoc|nnan|ninf|fast|volatile"
    r"|tail|musttail|notail) )*"
)
_TYPE = re.compile(r"<(?P<parts>\d+) x (?P<element>\w+)>|(?P<scalar>\w+)|\[.*?\]")
BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}


@dataclass(frozen=True)
class Type:
    """A scalar, or a vector of `parts`."""

    element: str
    parts: int = 1

    @classmethod
    def read(cls, text: str) -> Type:
        """The type that `text` begins with."""
        found = _TYPE.match(text)
        if found is None or (found["scalar"] is None and found["element"] is None):
            return cls("aggregate")
        return cls(found["scalar"] or found["element"], int(found["parts"] or 1))

    @property
    def bits(self) -> int:
        """Of one part."""
        return BITS.get(self.element) or (int(self.element[1:]) if re.fullmatch(r"i\d+", self.element) else 0)


@dataclass(eq=False)
class Instruction:
    """One statement: `result` = `word` `rest`, the flags of arithmetic left out."""

    result: str | None
    word: str
    rest: str

    @classmethod
    def read(cls, line: str) -> Instruction:
        text = _DEBUG.sub("", line.strip())
        result = _RESULT.match(text)
        text = text[result.end() :] if result else text
        text = _FLAGS.sub("", text)
        word, _, rest = text.partition(" ")
        return cls(result[1] if result else None, word, _FLAGS.sub("", rest))

    @property
    def type(self) -> Type:
        """Of the operands; for a comparison the type behind its predicate, for a selection that of its values."""
        text = self.rest
        if self.word in ("icmp", "fcmp"):
            text = _FLAGS.sub("", text.split(" ", 1)[1])
        elif self.word == "select":
            text = self.operands[1] if len(self.operands) > 1 else text
        return Type.read(text)

    @cached_property
    def operands(self) -> list[str]:
        """Split at the commas that are not inside of brackets."""
        parts, depth = [""], 0
        for character in self.rest:
            depth += (character in "<([{") - (character in ">)]}")
            if character == "," and depth == 0:
                parts.append("")
            else:
                parts[-1] += character
        return [part.strip() for part in parts]

    @cached_property
    def uses(self) -> list[str]:
        """The values that it takes, labels among them."""
        return _VALUE.findall(self.rest)

    @property
    def called(self) -> str:
        """The function's name, of a call."""
        found = re.search(r'@"?([\w.$]+)"?\(', self.rest)
        return found[1] if found else ""

    @property
    def arguments(self) -> list[str]:
        """Of a call, each with its type."""
        inside = self.rest[self.rest.index("(", self.rest.find("@")) + 1 : self.rest.rindex(")")]
        return Instruction(None, "", inside).operands

    def knows(self, operand: int) -> bool:
        """Whether an operand is a constant, be it another one in each part."""
        return "%" not in self.operands[operand]

    def constant(self, operand: int) -> int | None:
        """The integer that an operand is, the same in all parts, or None if it is no constant."""
        if operand >= len(self.operands):
            return None
        text = self.operands[operand]
        numbers = re.findall(r"(?:^|i\d+ )(-?\d+)", text.removeprefix("splat ").strip("()"))
        return int(numbers[0]) if numbers and not _VALUE.search(text) and len(set(numbers)) == 1 else None


@dataclass(eq=False)
class Block:
    """A basic block: once entered, all of it runs. `line` is where a counter can be put in."""

    line: int
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(eq=False)
class Function:
    """What is known of a function: by whom each value is made, and who takes it."""

    name: str
    seen: bool  # by the sanitizer; what is not is the emulator's own
    blocks: list[Block] = field(default_factory=list)

    @cached_property
    def makers(self) -> dict[str, Instruction]:
        return {each.result: each for block in self.blocks for each in block.instructions if each.result}

    @cached_property
    def takers(self) -> dict[str, list[Instruction]]:
        takers: dict[str, list[Instruction]] = {}
        for block in self.blocks:
            for each in block.instructions:
                if "__tsan_" in each.rest:  # looks on
                    continue
                for value in each.uses:
                    takers.setdefault(value, []).append(each)
        return takers

    def users(self, instruction: Instruction) -> list[Instruction]:
        """Who takes its result."""
        return self.takers.get(instruction.result or "", [])

    def maker(self, operand: str) -> Instruction | None:
        """Of an operand, such as `i32 %5`; None for arguments of the function and constants."""
        found = _VALUE.search(operand)
        return self.makers.get(found[0]) if found else None


def read_functions(code: str) -> Iterator[Function]:
    """All that are defined in a module."""
    lines = code.splitlines()
    attributes = {found[1]: found[2] for line in lines if (found := _ATTRIBUTES.match(line))}
    function: Function | None = None
    line = 0
    while line < len(lines):
        text = lines[line]
        if found := _FUNCTION.match(text):
            function = Function(found["name"], "sanitize_thread" in attributes[found["attributes"]], [Block(line + 1)])
        elif function is not None and text == "}":
            yield function
            function = None
        elif function is not None and _LABEL.match(text):
            if function.blocks[-1].instructions:  # the first block may have a label or none
                function.blocks.append(Block(line + 1))
            else:
                function.blocks[-1].line = line + 1
        elif function is not None and text.strip() and not text.lstrip().startswith(("#dbg", ";")):
            while text.rstrip().endswith("[") or (text.count("[") > text.count("]")):  # the cases of a switch
                line += 1
                text += " " + lines[line].strip()
            block, instruction = function.blocks[-1], Instruction.read(text)
            block.instructions.append(instruction)
            if instruction.word in ("phi", "alloca"):
                block.line = line + 1
        line += 1
