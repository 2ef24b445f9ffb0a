"""Tokenizers and chat templates, against those of tokenizers and transformers."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from llm_models import TEMPLATE, vocabulary

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.checkpoints.tokenizer.gguf_tokenizer import merges_of, read_metadata
from billfish.checkpoints.tokenizer.pre_tokenizers import CUTS
from billfish.checkpoints.tokenizer.tokenizer import byte_characters
from billfish.llm.chat_template import ChatTemplate

# ---- tokenizers -----------------------------------------------------------------------------------------------------


def test_checkpoints_and_the_tokenizer_import_nothing_from_llm():
    root = Path(bf.__file__).parent
    for path in [path for folder in ("tokenizer", "checkpoints") for path in sorted((root / folder).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("billfish.llm") for name in names), path


@pytest.mark.torch
def test_byte_characters_are_gpt2s():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert byte_characters() == {character: byte for byte, character in bytes_to_unicode().items()}


def metadata_of(architecture, **fields):
    pieces, kinds = vocabulary(architecture)
    about = {"model": "gpt2", "tokens": pieces, "token_type": kinds, "merges": ["a b"], "bos_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in (about | {"eos_token_id": 1} | fields).items()}


@pytest.mark.parametrize("pre", CUTS)
def test_every_cut_gives_the_text_back(pre):
    tokenizer = read_metadata(metadata_of("llama", pre=pre))
    text = "ab's  ab12345 \n\n\té🎣<s>ab"
    tokens = tokenizer.encode(text, special=False, start=False)
    assert tokenizer.decode(tokens) == text
    assert tokens[0] == tokenizer.pieces.index("ab")
    assert 0 not in tokens


def made_encoder(tokenizer) -> bool:
    return tokenizer._encoder is not None


@pytest.mark.parametrize("pre", CUTS)
def test_short_texts_have_the_tokens_that_the_library_finds(pre):
    chance = random.Random(pre)
    characters = [*byte_characters()]
    pieces, merges = [*characters, "<s>", "[PAD9]"], []
    for _ in range(400):
        left, right = chance.choice(pieces[97:]), chance.choice(pieces[: 256 if chance.random() < 0.5 else None])
        if "<s>" not in (left, right) and "[" not in left + right and left + right not in pieces:
            pieces.append(left + right)
            merges.append(f"{left} {right}")
    chance.shuffle(merges)
    kinds = [{"<s>": 3, "[PAD9]": 5}.get(piece, 1) for piece in pieces]
    quick = read_metadata(metadata_of("llama", pre=pre, tokens=pieces, token_type=kinds, merges=merges + merges[:9]))
    whole = read_metadata(metadata_of("llama", pre=pre, tokens=pieces, token_type=kinds, merges=merges + merges[:9]))
    assert whole.encoder.model.ignore_merges == CUTS[pre].ignore_merges
    letters = [piece for piece in pieces if piece.isascii()] + [*" \n1é中🎣\u0301", "'s", "<s>", "[PAD9]", "\x7f"]
    for _ in range(100):
        text = "".join(chance.choices(letters, k=chance.randrange(30)))
        for special in (True, False):
            expected = whole.encode(text, special=special)
            assert quick.encode(text, special=special) == expected, text
    assert (made_encoder(quick), made_encoder(whole)) == (False, True)


def test_a_long_text_makes_the_librarys_encoder():
    tokenizer = read_metadata(metadata_of("llama", pre="smollm"))
    assert tokenizer.encode("ab" * 10, start=False) == [tokenizer.pieces.index("ab")] * 10
    assert not made_encoder(tokenizer)
    assert tokenizer.encode("ab" * 5000, start=False) == [tokenizer.pieces.index("ab")] * 5000
    assert made_encoder(tokenizer)


def test_threads_share_one_encoder_of_the_library():
    tokenizer, made, start = read_metadata(metadata_of("llama", pre="smollm")), [], threading.Barrier(4)

    def make() -> None:
        start.wait()
        made.append(tokenizer.encoder)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(encoder) for encoder in made}) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python hashes by SipHash-1-3 from 3.11 on")
def test_pieces_are_hashed_as_python_hashes_texts():
    """Which takes a key of zeros where PYTHONHASHSEED is 0."""
    texts = ["a" * length + "bc" for length in range(40)]
    code = f"print([hash(text) % 2**64 for text in {texts}])"
    told = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "0"}, capture_output=True, check=True)
    assert [_cpu.sip_hash(text, 0, 0) for text in texts] == json.loads(told.stdout)
    hashes = {_cpu.sip_hash("a", *keys) for keys in ((0, 0), (1, 0), (0, 1))}
    assert len(hashes) == 3


def test_an_added_token_that_looks_like_a_byte_is_left_to_the_library():
    pieces, kinds = vocabulary("llama")
    kinds = [4 if piece == "a" else kind for piece, kind in zip(pieces, kinds, strict=True)]
    tokenizer = read_metadata(metadata_of("llama", token_type=kinds))
    assert tokenizer.encode("abb", start=False) == [pieces.index("a"), *[pieces.index("b")] * 2]
    assert made_encoder(tokenizer)


def test_control_tokens_count_where_they_may():
    tokenizer = read_metadata(metadata_of("llama", add_bos_token=True))
    ab = tokenizer.pieces.index("ab")
    assert tokenizer.encode("<|user|>ab") == [0, 2, ab]
    assert tokenizer.encode("<s>ab") == [0, ab]
    assert tokenizer.encode("ab", start=False) == [ab]
    assert tokenizer.decode([0, 2, ab, 1]) == "ab"
    assert tokenizer.ends == {1}


def test_sentencepiece_merges_by_score_and_spells_the_rest_in_bytes():
    pieces, _ = vocabulary("gemma")
    scores = [0.0] * 260 + [-1.0, -2.0, -3.0, -5.0, -4.0, -6.0]
    tokenizer = read_metadata(metadata_of("gemma", model="llama", scores=scores))
    names = [pieces[token] for token in tokenizer.encode("ab a é", start=False)]
    # "ab" scores above "▁a", so it is made first, and then "▁ab".
    assert names == ["▁ab", "▁a", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab a é")) == " ab a é"
    assert tokenizer.encode("ab")[0] == 0


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_a_tokenizer_as_json_does_the_same(architecture):
    from tokenizers import Tokenizer as Fast

    model, more = ("llama", {"scores": [-float(i) for i in range(266)]}) if architecture == "gemma" else ("gpt2", {})
    tokenizer = read_metadata(metadata_of(architecture, model=model, add_bos_token=True, **more))
    again = Fast.from_str(tokenizer.encoder.to_str())
    for text in ("ab's  ab12 \n\té🎣", " a", "ab</s>", ""):
        tokens = tokenizer.encode(text)
        assert again.encode(text).ids == tokens
        assert again.decode(tokens) == tokenizer.decode(tokens).removeprefix(" " if model == "llama" else "")


def test_characters_spread_over_tokens_wait_for_their_last_byte():
    tokenizer = read_metadata(metadata_of("llama"))
    tokens = tokenizer.encode("é🎣", start=False)
    assert list(tokenizer.stream(tokens)) == ["", "é", "", "", "", "🎣", ""]
    assert list(tokenizer.stream(tokens[:-1]))[-1] == "�"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": 3}, r"tokens.*3.*vocabulary"),
        ({"token_type": [1]}, r"token_type.*list of"),
        ({"merges": ["no such"]}, "tokenizer.* is damaged"),
        ({"merges": None}, "tokenizer.* is damaged"),
        ({"tokens": ["a", "[PAD0]"], "token_type": [1, 5], "merges": ["a "]}, "tokenizer.* is damaged.*no token"),
        (
            {"tokens": ["a", "< s>"], "token_type": [1, 3], "merges": [], "bos_token_id": 1, "add_bos_token": True},
            "damaged",
        ),
        ({"bos_token_id": 9999}, r"bos_token_id.*9999.*0 to"),
        ({"eos_token_id": "x"}, r"eos_token_id.*'x'"),
    ],
)
def test_vocabularies_that_make_no_sense(fields, message):
    with pytest.raises(bf.ModelError, match=message):
        read_metadata(metadata_of("llama", **fields))


def test_bytes_that_are_none():
    pieces, kinds = vocabulary("gemma")
    pieces[10] = "<0xZZ>"
    with pytest.raises(bf.ModelError, match="'<0xZZ>'"):
        read_metadata(metadata_of("gemma", model="llama", tokens=pieces, token_type=kinds, scores=[0.0] * len(pieces)))


def test_pieces_outside_of_the_byte_alphabet_are_text():
    pieces, kinds = vocabulary("llama")
    tokenizer = read_metadata(metadata_of("llama", tokens=[*pieces, "a reserved token"], token_type=[*kinds, 5]))
    assert tokenizer.decode([len(pieces)]) == "a reserved token"


def test_unknown_tokenizers_are_refused():
    for fields in ({"model": "rwkv"}, {"pre": "unheard of"}):
        with pytest.raises(bf.ModelError, match=r"tokenizer.ggml.model.*'"):
            read_metadata(metadata_of("llama", **fields))


# ---- chat templates -------------------------------------------------------------------------------------------------

TEMPLATES = {
    "small": TEMPLATE,
    "smollm": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{{ bos_token }}\n  {%- for m in messages %}\n    {% if m.role == 'system' %}\n{% continue %}\n"
    "{% endif %}\n[{{ loop.index0 }}] {{ m.content | trim | tojson }}{{ eos_token }}\n{%- endfor %}\n",
}


@pytest.mark.torch
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_render_as_transformers_renders_them(source):
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Fast(BPE()), bos_token="<s>", eos_token="</s>")
    theirs.chat_template = source
    messages = [
        {"role": "system", "content": "Be <brief> & kind."},
        {"role": "user", "content": " 1 < 2, isn't it? é🎣 "},
        {"role": "assistant", "content": 'Yes "it" is.'},
        {"role": "user", "content": "Why?"},
    ]
    for conversation in (messages, messages[1:2]):
        expected = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(conversation) == expected


def test_merges_are_all_pairs_that_make_a_piece():
    """As the definition says, piece by piece and cut by cut."""
    rng = random.Random(0)
    pieces = list({"".join(rng.choices("ab\u2581", k=rng.choice([0, 1, 2, 3, 4, 6]))): None for _ in range(200)})
    scores = [rng.choice([0.0, -1.0, -2.0]) for _ in pieces]
    rank = {piece: i for i, piece in enumerate(pieces)}
    pairs = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
    known = [pair for pair in pairs if pair[0] in rank and pair[1] in rank]
    known.sort(key=lambda pair: (-scores[rank["".join(pair)]], rank["".join(pair)], rank[pair[0]], rank[pair[1]]))
    assert len(known) > 100
    assert merges_of(rank, scores) == known
