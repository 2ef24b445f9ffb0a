"""The tokenizers of the families of models that run: a row for each, with the token ids that their publishers chose.

Vocabularies are small ones of our own. Their control tokens have the published names and ids, and text is cut and
merged as in the published tokenizer.json files.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from billfish.checkpoints.tokenizer.gguf_tokenizer import merges_of
from billfish.checkpoints.tokenizer.pre_tokenizers import CUTS

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HARMONY = (
    "<|start|>assistant<|channel|>analysis<|message|>{{ t }}<|end|>"
    "<|start|>assistant<|channel|>final<|message|>{{ c }}<|return|>{{ '<|call|>' }}"
)
TEXT = """The quick brown fox can't jump over 12345 lazy dogs, and they'll SAY so: 'We're 67 years old!'
def area(width, height):
    return width * height  # 2024-11-18, 3.14159

Él niño comió piñata; naïve café, Straße, ΑΒΓ αβγ, 中文字符 and emoji 🎣🎣.

camelCaseWords HTTPServer snake_case_words ((nested)) ... --- ### $$$ 100% http://a.b/c?d=e&f=g
"""
TEXTS = [
    *TEXT.splitlines(),
    TEXT,
    "",
    " two  spaces   three\n\n\nlines\r\n\r\nend  ",
    "I'M you'Re 1234567 x1y22z333",
    "cafe\u0301 n\u0303 \u0928\u092e\u0938\u094d\u0924\u0947",  # decomposed letters, and marks without letters
    "a/b//c\n/d ...\n!!\n\nEND",
]


@dataclass(frozen=True)
class Family:
    """A tokenizer. control: control tokens by id. text_ends, turn_ends: those that end an answer."""

    architectures: str  # GGUF's, and which models where it is not all
    size: int  # rows of the embedding
    pre: str  # `tokenizer.ggml.pre` as llama.cpp's converter writes it; "spm" and "gemma4" are not byte-level
    control: dict[int, str]
    ends: set[int]
    eos: int
    bos: int | None = None
    listed: tuple[int, ...] = ()  # eos_token_id of generation_config.json, where it is a list
    template: str = ""
    starts: bool = False  # whether texts begin with bos
    ignore_merges: bool = False
    visible: dict[int, str] = field(default_factory=dict)  # added tokens that are no control tokens
    strips: bool = False  # control tokens take the spaces behind them
    named: dict[str, int] = field(default_factory=dict)  # more that llama.cpp's converter writes: eot, eom
    space_first: bool = True  # SentencePiece sets a space before a text

    @property
    def architecture(self) -> str:
        return self.architectures.split()[0].strip(",")


LLAMA2 = {0: "<unk>", 1: "<s>", 2: "</s>"}
LLAMA3 = {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128006: "<|start_header_id|>"}
LLAMA3 |= {128007: "<|end_header_id|>", 128008: "<|eom_id|>", 128009: "<|eot_id|>"}
QWEN = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
GEMMA = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"}
GEMMA_TEMPLATE = "{{ bos_token }}<start_of_turn>{{ r }}\n{{ c }}<end_of_turn>\n"
PHI3 = {0: "<unk>", 1: "<s>", 32000: "<|endoftext|>", 32001: "<|assistant|>", 32006: "<|system|>"}
TEKKEN = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]", 9: "[TOOL_CALLS]"}
DOLMA2 = {100257: "<|endoftext|>", 100264: "<|im_start|>", 100265: "<|im_end|>", 100277: "<|pad|>"}
GLM = {151329: "<|endoftext|>", 151330: "[MASK]", 151331: "[gMASK]", 151333: "<sop>", 151335: "<|system|>"}
GLM |= {151336: "<|user|>", 151337: "<|assistant|>", 151338: "<|observation|>"}
O200K = {199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>", 200003: "<|constrain|>"}
O200K |= {200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>", 200008: "<|message|>", 200012: "<|call|>"}
GEMMA4 = GEMMA | {4: "<mask>", 46: "<|tool>", 47: "<tool|>", 50: "<|tool_response>", 51: "<tool_response|>"}
GEMMA4 |= {98: "<|think|>", 105: "<|turn>", 106: "<turn|>"}

FAMILIES: dict[str, Family] = {
    "Llama 2, Mixtral, Mistral 7B": Family(
        "llama", 32000, "spm", LLAMA2, {2}, 2, 1, template="[INST] {{ c }} [/INST] {{ eos_token }}", starts=True
    ),
    "Llama 3": Family(
        "llama", 128256, "llama-bpe", LLAMA3, {128001, 128008, 128009}, 128009, 128000, (128001, 128008, 128009),
        "{{ bos_token }}<|start_header_id|>user<|end_header_id|>{{ c }}<|eot_id|>{{ '<|eom_id|>' }}", starts=True,
        ignore_merges=True,
    ),
    "Mistral Nemo, Ministral 3": Family(
        "mistral3, llama", 131072, "tekken", TEKKEN | {10: "<pad>", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]"},
        {2}, 2, 1, template="[INST]{{ c }}[/INST]{{ a }}{{ eos_token }}", starts=True, ignore_merges=True,
    ),
    "SmolLM2": Family(
        "llama", 49152, "smollm", {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>", 3: "<repo_name>"}, {0, 2},
        2, 1, template=CHATML,
    ),
    "SmolLM3": Family(
        "smollm3", 128256, "llama-bpe", {**LLAMA3, 128011: "<|im_start|>", 128012: "<|im_end|>"}, {128001, 128012},
        128012, 128000, template=CHATML, ignore_merges=True,
    ),
    "Qwen 1.5 to 3": Family(
        "qwen3, qwen3moe, qwen2, qwen2moe, qwen3next", 151936, "qwen2", QWEN, {151643, 151645}, 151645,
        listed=(151645, 151643), template=CHATML, visible={151667: "<think>", 151668: "</think>"},
    ),
    "Qwen 3.5 to 3.8": Family(
        "qwen35, qwen35moe", 248320, "qwen35", {248044: "<|endoftext|>", 248045: "<|im_start|>", 248046: "<|im_end|>"},
        {248044, 248046}, 248046, listed=(248046, 248044), template=CHATML,
        visible={248068: "<think>", 248069: "</think>"},
    ),
    "Gemma 1 and 2": Family(
        "gemma2, gemma", 256000, "spm", GEMMA | {106: "<start_of_turn>", 107: "<end_of_turn>"}, {1, 107}, 1, 2,
        (1, 107), GEMMA_TEMPLATE, starts=True, visible={108: "\n", 109: "\n\n", 212: "</s>"}, space_first=False,
    ),
    "Gemma 3": Family(
        "gemma3", 262208, "spm", GEMMA | {105: "<start_of_turn>", 106: "<end_of_turn>"}, {1, 106}, 1, 2, (1, 106),
        GEMMA_TEMPLATE, starts=True, visible={107: "\n", 108: "\n\n", 212: "</s>"}, space_first=False,
    ),
    "Gemma 4": Family(
        "gemma4", 262144, "gemma4", GEMMA4, {1, 50, 106}, 1, 2, (1, 106, 50),
        "{{ bos_token }}<|turn>{{ r }}\n{{ c }}<turn|>\n<|tool_call>{{ t }}<tool_call|><|tool_response>", starts=True,
        visible={212: "</s>"}, space_first=False,
    ),
    "Phi 3": Family(
        "phi3", 32064, "spm", PHI3 | {32007: "<|end|>", 32010: "<|user|>"}, {32000, 32007}, 32000, 1,
        (32000, 32007), "{{ bos_token }}<|user|>\n{{ c }}<|end|>\n<|assistant|>\n", starts=True, strips=True,
    ),
    "Phi 4": Family(
        "phi3", 100352, "dbrx", {100257: "<|endoftext|>", 100264: "<|im_start|>", 100265: "<|im_end|>",
        100266: "<|im_sep|>"}, {100257, 100265}, 100265, 100257, template=CHATML,
    ),
    "Phi 4 mini": Family(
        "phi3", 200064, "gpt-4o", {199999: "<|endoftext|>", 200018: "<|endofprompt|>", 200019: "<|assistant|>",
        200020: "<|end|>", 200021: "<|user|>"}, {199999, 200020}, 199999, 199999, (200020, 199999),
        "<|user|>{{ c }}<|end|><|assistant|>",
    ),
    "gpt-oss": Family(
        "gpt-oss", 201088, "gpt-4o", O200K, {199999, 200002, 200012}, 200002, 199998, (200002, 199999, 200012),
        HARMONY, ignore_merges=True,
    ),
    "Granite 3": Family(
        "granitemoe", 49155, "refact", {0: "<|end_of_text|>", 49152: "<|start_of_role|>", 49153: "<|end_of_role|>",
        49154: "<|tool_call|>"}, {0}, 0, 0, template="<|start_of_role|>user<|end_of_role|>{{ c }}<|end_of_text|>\n",
    ),
    "Granite 4": Family(
        "granitehybrid", 100352, "dbrx", {100256: "<|pad|>", 100257: "<|end_of_text|>", 100264: "<|start_of_role|>",
        100265: "<|end_of_role|>"}, {100257}, 100257, 100257,
        template="<|start_of_role|>user<|end_of_role|>{{ c }}<|end_of_text|>\n",
    ),
    "OLMoE": Family(
        "olmoe", 50304, "olmo", {1: "<|padding|>", 50279: "<|endoftext|>"}, {50279}, 50279,
        template="{{ bos_token }}<|user|>\n{{ c }}\n{{ eos_token }}\n",
    ),
    "OLMo 2": Family(
        "olmo2", 100352, "dbrx", DOLMA2, {100257}, 100257, 100257,
        template="<|user|>\n{{ c }}\n<|assistant|>\n{{ a }}{{ eos_token }}",
    ),
    "OLMo 3": Family(
        "olmo2", 100278, "dbrx", DOLMA2, {100257, 100265}, 100257, listed=(100265, 100257), template=CHATML
    ),
    "GLM 4.5 to 4.7": Family(
        "glm4moe", 151552, "glm4", GLM, {151329, 151336, 151338}, 151329, listed=(151329, 151336, 151338),
        template="[gMASK]<sop><|user|>\n{{ c }}<|assistant|>\n", ignore_merges=True,
        named={"eot": 151336, "eom": 151338},
    ),
    "ERNIE 4.5": Family(
        "ernie4_5", 103424, "spm", LLAMA2 | {100272: "<|end_of_sentence|>", 100273: "<|begin_of_sentence|>"}, {2}, 2,
        1, template="<|begin_of_sentence|>User: {{ c }}\nAssistant: {{ a }}<|end_of_sentence|>", space_first=False,
    ),
    "Seed-OSS": Family(
        "seed_oss", 155136, "seed-coder", {0: "<seed:bos>", 1: "<seed:pad>", 2: "<seed:eos>"}, {2}, 2, 0,
        template="<seed:bos>user\n{{ c }}<seed:eos>",
    ),
    "MiniMax M2": Family(
        "minimax-m2", 200064, "minimax-m2", {200019: "]~b]", 200020: "[e~[", 200034: "]~!b["}, {200020}, 200020,
        200034, template="]~!b[]~b]user\n{{ c }}[e~[\n]~b]ai\n",
    ),
    "LFM2": Family(
        "lfm2, lfm2moe", 65536, "lfm2", {0: "<|pad|>", 1: "<|startoftext|>", 2: "<|endoftext|>", 6: "<|im_start|>",
        7: "<|im_end|>"}, {2, 7}, 7, 1, template="{{ bos_token }}" + CHATML, starts=True, ignore_merges=True,
    ),
}  # fmt: skip


@functools.cache
def _learned() -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces and merges that also join words, digits, spaces and lines: where text is cut, other pieces come out."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    encoder.train_from_iterator(TEXTS * 2, trainer)
    model = json.loads(encoder.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(pair) for pair in model["merges"]]


@functools.cache
def _spelled() -> tuple[list[str], list[tuple[str, str]]]:
    """The same for SentencePiece: pieces of characters, and all merges that make one of them."""
    words = [word for word in "".join(TEXTS).replace(" ", " ▁").replace("\n", " \n ").split(" ") if word]
    pieces = dict.fromkeys("".join(TEXTS).replace(" ", "▁").replace("🎣", ""))
    pieces |= dict.fromkeys(word[:end] for word in words for end in range(2, 1 + len(word)) if "🎣" not in word)
    listed = [f"<0x{byte:02X}>" for byte in range(256)] + list(pieces)
    return listed, merges_of({piece: i for i, piece in enumerate(listed)}, [-float(i) for i in range(len(listed))])


def write_family(folder: Path, family: Family) -> None:
    """A folder's tokenizer.json, tokenizer_config.json, generation_config.json and config.json."""
    byte_level = family.pre in CUTS
    listed, merges = _learned() if byte_level else _spelled()
    taken = family.control | family.visible
    free = (i for i in range(family.size) if i not in taken)
    known = set(taken.values())
    vocabulary = {piece: token for token, piece in taken.items()}
    vocabulary |= {piece: next(free) for piece in listed if piece not in known}
    if byte_level:
        encoder = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=family.ignore_merges))
        _cut(encoder, family)
    else:
        encoder = tokenizers.Tokenizer(
            models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        before = [normalizers.Prepend("▁")] if family.space_first else []
        encoder.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
        after = [decoders.Strip(" ", 1, 0)] if family.space_first else []
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
        encoder.decoder = decoders.Sequence(parts)
    plain = ("<unk>", "<s>", "<|endoftext|>")
    for piece in family.control.values():
        strips = family.strips and piece not in plain
        added = tokenizers.AddedToken(piece, special=True, normalized=False, rstrip=strips)
        encoder.add_special_tokens([added])
    encoder.add_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in family.visible.values()])
    if family.starts:
        bos = taken[family.bos]
        encoder.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, family.bos)])
    encoder.save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"eos_token": taken[family.eos], "chat_template": family.template}
    about |= {} if family.bos is None else {"bos_token": taken[family.bos]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": family.listed or family.eos}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": family.eos, "vocab_size": family.size}))


def _cut(encoder: tokenizers.Tokenizer, family: Family) -> None:
    """As the published files have it: some remove what is between the finds of a pattern instead of isolating them."""
    cut, parts = CUTS[family.pre], list[Any]()
    if cut.digits_alone:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        removed = family.pre == "dbrx"
        regex = tokenizers.Regex(cut.pattern)
        parts.append(pre_tokenizers.Split(regex, "removed" if removed else "isolated", invert=removed))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(parts)
    encoder.decoder = decoders.ByteLevel()
    if family.pre.startswith("qwen"):
        encoder.normalizer = normalizers.NFC()
