"""Text to try tokenizers and models on: always the same."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

_WORDS = (
    "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about out "
    "don't I'll we've it's you're HELLO World iPhone e-mail naïve café Straße Ångström São fjord coöperate"
)
WORDS = _WORDS.split()
CODE = (
    "def f(x: int) -> str:",
    "\treturn {**x, 'a': [1, 2.5e-3, 0xFF]}",
    "    for (int i = 0; i < n; ++i) { a[i] += b[i] * c; }",
    "SELECT name, COUNT(*) FROM t WHERE id != 42 GROUP BY name;",
    '<div class="x">&nbsp;</div>  <!-- comment -->',
    "#include <stdio.h>\\n",
    "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }",
    "x = y if z else lambda *args, **kw: None  # noqa",
    'git commit -m "fix: it\'s broken" && echo $?',
    "https://example.org/a/b?c=d&e=%20f#g",
)
EMOJI = ("😀", "👍🏽", "👩‍👩‍👧‍👦", "🇫🇷", "🏳️‍🌈", "❤️", "🎣", "1️⃣", "☃", "🤷🏿‍♀️")
SPACES = (" ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", " \n", "\r\n", "\u00a0", "\u2003", "\u3000", "\u200b", "      ")
PUNCTUATION = (
    *".,;:!?-()[]{}\"'`~@#$%^&*_+=|\\/<>",
    *("...", "--", "—", "…", "«", "»", "“", "”", "‘s", "'S", "'LL", "''"),  # noqa: RUF001
)
# Blocks of scripts, some with digits and combining marks of their own.
SCRIPTS = (
    (0x00C0, 0x024F), (0x0370, 0x03FF), (0x0400, 0x04FF), (0x05D0, 0x05EA), (0x0621, 0x0669), (0x0905, 0x096F),
    (0x0E01, 0x0E5B), (0x1E00, 0x1EFF), (0x2200, 0x22FF), (0x2460, 0x24FF), (0x3041, 0x30FF), (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3), (0x0300, 0x036F), (0x1D400, 0x1D7FF), (0x1F600, 0x1F64F),
)  # fmt: skip


def varied_lines(count: int = 3000) -> list[str]:
    """Prose, code, numbers, all kinds of white space, many scripts, emoji, and what mixes them."""
    chance = random.Random(7)

    def characters(script: tuple[int, int], length: int) -> str:
        found = (chr(chance.randint(*script)) for _ in range(length))
        return "".join(c for c in found if unicodedata.category(c) != "Cn")

    def piece() -> str:
        kind = chance.randrange(10)
        if kind < 4:
            return chance.choice(SPACES[:2]) + chance.choice(WORDS)
        if kind == 4:
            return str(chance.choice([chance.randrange(10), chance.randrange(100000), chance.random(), -7]))
        if kind == 5:
            return chance.choice(PUNCTUATION) * chance.choice([1, 1, 2, 3])
        if kind == 6:
            return chance.choice(SPACES)
        if kind == 7:
            return chance.choice(EMOJI)
        return chance.choice(["", " "]) + characters(chance.choice(SCRIPTS), chance.randint(1, 8))

    lines = ["", " ", "\n", "a", *CODE, *EMOJI, *SPACES, *PUNCTUATION]
    while len(lines) < count:
        kind = chance.randrange(6)
        if kind == 0:
            lines.append(chance.choice(CODE) + chance.choice(SPACES) + chance.choice(CODE))
        elif kind == 1:
            lines.append(" ".join(chance.choice(WORDS) for _ in range(chance.randint(3, 15))) + ".")
        else:
            lines.append("".join(piece() for _ in range(chance.randint(1, 25))))
    return lines


PROSE = """The harbour was quiet that morning. Two boats had come in with the tide, and their crews sat on the wall,
mending nets and talking about the price of fuel. "It won't last," said the older one. "In 1987 we had three weeks of
calm, and then the storm took the pier." Nobody answered; they had heard the story before, and it was mostly true.

To measure how fast a wave moves in deep water, take its length, multiply it by the acceleration of gravity (about 9.81
m/s^2), divide by two times pi, and take the square root. A wave of 100 metres therefore travels at 12.5 metres per
second, which is 45 kilometres per hour.

def wave_speed(length: float, gravity: float = 9.81) -> float:
    \"\"\"The speed of a wave in deep water, in metres per second.\"\"\"
    return math.sqrt(gravity * length / (2 * math.pi))

La mer était calme, mais le vieux pêcheur regardait l'horizon. Die Kinder spielten am Strand und sammelten Muscheln.
The billfish are a family of large predatory fish with a long, spear-like upper jaw: the marlins, the sailfishes and the
spearfishes. They are found in all oceans, although they usually live in tropical and subtropical waters, and they are
among the fastest swimmers known. Using the bill, they slash at and stun their prey, which makes it easier to catch.
"""


def samples() -> list[str]:
    """Some of each kind, to compare models on."""
    license = (Path(__file__).parents[2] / "LICENSE").read_text()
    return [PROSE, license[:1800], "\n".join(varied_lines()[100:116])]
