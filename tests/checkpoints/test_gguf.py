"""The header of GGUF files: what the `gguf` library reads there, and what is refused."""

from __future__ import annotations

import itertools
import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from common import gaussian
from llm_folders import write_random
from llm_models import Small, write_model

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.checkpoints.gguf_header import GGML_TYPES, header_bytes, read_header
from billfish.checkpoints.layouts.gguf import PLAIN, Metadata, ggml_names
from billfish.checkpoints.safetensors_files import MappedFile
from billfish.cli.main import main
from billfish.core.formats.ggml import BlockFormat
from billfish.llm import default_model, load

NUMBERS = {type_.name: number for number, type_ in GGML_TYPES.items()}
STRING, ARRAY = 8, 9

# ---- files, byte by byte --------------------------------------------------------------------------------------------


def text(content: str | bytes) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(content)) + content


def field(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def items(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str | bytes, extents: tuple[int, ...], number: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, number, offset)


def file_of(fields: list[bytes], tensors: list[bytes], nbytes: int = 4096, version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields + tensors)
    return header + bytes(-len(header) % 32 + nbytes)


# ---- beside the library ---------------------------------------------------------------------------------------------


def assert_read_as_by_the_library(path: Path) -> None:
    header, theirs = read_header(MappedFile(path)), gguf.GGUFReader(path)
    fields = {name: found for name, found in theirs.fields.items() if not name.startswith("GGUF.")}
    metadata = Metadata(header.fields)
    assert list(metadata) == list(fields)
    for name, found in fields.items():
        kinds = [int(kind) for kind in found.types]
        if kinds[0] != ARRAY or len(kinds) > 1:  # of an empty list, the library does not say which
            assert metadata.types(name) == (kinds[0], kinds[1] if kinds[0] == ARRAY else None)
        expected = found.contents() if found.data or kinds[0] != ARRAY else []
        assert repr(metadata[name]) == repr(expected), name
    assert len(header.tensors) == len(theirs.tensors)
    for info, found in zip(header.tensors, theirs.tensors, strict=True):
        shape = tuple(found.shape.tolist()[::-1])
        assert info[:4] == (found.name, found.tensor_type.name, shape, found.data_offset)
        assert info.kind == "Q8_1" or info.nbytes == found.n_bytes


@pytest.mark.full  # test_containers.py has the library read this file, too
def test_the_real_header_is_what_the_library_reads():
    assert_read_as_by_the_library(default_model())


VALUES = {
    0: ("B", (0, 255)),
    1: ("b", (-128, 127)),
    2: ("H", (0, 65535)),
    3: ("h", (-32768, 32767)),
    4: ("I", (0, 2**32 - 1)),
    5: ("i", (-(2**31), 2**31 - 1)),
    6: ("f", (-1.5, 3.0e38, float("inf"), float("nan"), 1e-45)),
    7: ("?", (False, True)),
    10: ("Q", (0, 2**64 - 1)),
    11: ("q", (-(2**63), 2**63 - 1)),
    12: ("d", (-1.5, 1e308, float("-inf"), 5e-324)),
}


def test_every_type_of_field_and_of_tensor_is_what_the_library_reads(tmp_path):
    assert {int(kind) for kind in gguf.GGUFValueType} == {*VALUES, STRING, ARRAY}
    words = ["", "a", "ü🎣", "\0", "x" * 1000]
    fields = [field(f"string.{i}", STRING, text(word)) for i, word in enumerate(words)]
    fields.append(field("list.strings", ARRAY, items(STRING, len(words), b"".join(map(text, words)))))
    fields.append(field("list.no.strings", ARRAY, items(STRING, 0, b"")))
    for kind, (letter, values) in VALUES.items():
        fields += [field(f"{kind}.{value}", kind, struct.pack(f"<{letter}", value)) for value in values]
        for count in (0, 1, len(values)):
            data = struct.pack(f"<{count}{letter}", *values[:count])
            fields.append(field(f"list.{kind}.{count}", ARRAY, items(kind, count, data)))
    tensors, offset = [], 0
    for number, (name, block, nbytes) in GGML_TYPES.items():
        for axes in ((), (3,), (2, 3), (1, 2, 3)) if block > 1 else ((), (3,), (2, 3, 5), (0,)):
            tensors.append(tensor(f"{name}.{axes}", (2 * block, *axes), number, offset))
            offset += -(-2 * nbytes * int(np.prod(axes)) // 32) * 32 + (192 if name == "Q8_1" else 0)
    tensors += [tensor("scalar", (), 0, offset), tensor("ü", (1,), 0, offset)]
    for version, alignment in itertools.product((2, 3), (None, 8, 64)):
        about = [] if alignment is None else [field("general.alignment", 4, struct.pack("<I", alignment))]
        path = tmp_path / f"{version}-{alignment}.gguf"
        used = [t for t in tensors if alignment != 64] or [tensor("t", (16,)), tensor("u", (16,), 0, 64)]
        path.write_bytes(file_of([*fields, *about], used, offset + 4096, version))
        assert_read_as_by_the_library(path)


def test_sizes_of_types_are_those_of_the_library_and_of_our_formats():
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items() if kind.name != "Q8_1"}
    shared = theirs.keys() & GGML_TYPES.keys()
    assert len(shared) >= 32
    assert {number: theirs[number] for number in shared} == {number: tuple(GGML_TYPES[number]) for number in shared}
    assert {NUMBERS[name] for name in (*ggml_names(), *PLAIN.values())} <= GGML_TYPES.keys()
    for ggml_name, name in {**ggml_names(), "Q8_1": "q8_1"}.items():
        format = bf.get_format(name)
        assert isinstance(format, BlockFormat)
        assert GGML_TYPES[NUMBERS[ggml_name]][1:] == (format.block_size, format.struct.itemsize)


# ---- refused --------------------------------------------------------------------------------------------------------

LYING = 2**64 - 1
SOUND_FIELD, SOUND_TENSOR = field("a", 4, bytes(4)), tensor("t", (8,))
LIST_OF_ALL = struct.pack("<IQ", STRING, LYING)
REFUSED = {
    "version 1": (file_of([], [], version=1), "b'GGUF', version 1.*2 or 3"),
    "version 4": (file_of([], [], version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32), "big-endian"),
    "nothing else": (b"GGUF", "4 bytes.*Download"),
    "tensors that are not there": (b"GGUF" + struct.pack("<IQQ", 3, LYING, 0), "not a complete"),
    "fields that are not there": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 16), "not a complete"),
    "too many fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, LYING), f"{LYING} fields.*65536"),
    "a long name": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, LYING), f"a string of {LYING} bytes"),
    "a name that ends the file": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("abc"), "not a complete"),
    "a long string": (file_of([text("a") + struct.pack("<IQ", STRING, 2**63)], []), "a string of"),
    "a name in Latin-1": (file_of([field(b"\xe9", 4, bytes(4))], []), "codec can't decode byte 0xe9"),
    "a string in Latin-1": (file_of([field("a", STRING, text(b"\xe9"))], []), "codec can't decode byte 0xe9"),
    "a tensor in Latin-1": (file_of([], [tensor(b"\xe9", (8,))]), "codec can't decode byte 0xe9"),
    "a field twice": (file_of([SOUND_FIELD, SOUND_FIELD], []), "the field a occurs twice"),
    "a tensor twice": (file_of([], [SOUND_TENSOR, SOUND_TENSOR]), "the tensor 't' occurs twice"),
    "type 13": (file_of([field("a", 13, bytes(8))], []), "type 13"),
    "a list of type 13": (file_of([field("a", ARRAY, items(13, 1, bytes(8)))], []), "type 13 of a list"),
    "a list of lists": (file_of([field("a", ARRAY, items(ARRAY, 1, items(4, 1, bytes(4))))], []), "type 9 of a list"),
    "a long list": (file_of([field("a", ARRAY, items(4, LYING, b""))], []), "items passes the end"),
    "a long list of bytes": (file_of([field("a", ARRAY, items(0, 2**32, b""))], []), "items passes the end"),
    "many strings": (file_of([field("a", ARRAY, LIST_OF_ALL + text("x"))], []), "strings.*16777216"),
    "a string that turns back": (
        file_of([field("a", ARRAY, items(STRING, 2, struct.pack("<Q", LYING - 7) + text("x")))], []),
        "a list of 2 strings.*after 0",
    ),
    "a bool of 2": (file_of([field("a", 7, b"\x02")], []), "a bool that is neither 0 nor 1"),
    "bools of 255": (file_of([field("a", ARRAY, items(7, 2, b"\x01\xff"))], []), "a bool that is neither 0 nor 1"),
    "5 axes": (file_of([], [tensor("t", (1,) * 5)]), "t has 5 axes"),
    "many axes": (file_of([], [text("t") + struct.pack("<I", 2**32 - 1)]), "t has 4294967295 axes"),
    "a product of 2^64": (file_of([], [tensor("t", (2**32, 2**32))]), "t is too large"),
    "an extent of 2^64 - 1": (file_of([], [tensor("t", (LYING, 0))]), "t is too large"),
    "part of a block": (file_of([], [tensor("t", (48,), 2)]), "t.*rows of 48.*32.*Q4_0"),
    "no axis in blocks": (file_of([], [tensor("t", (), 2)]), "t.*rows of 1 "),
    "part of a block that we do not read": (file_of([], [tensor("t", (128,), 16)]), "rows of 128 .*IQ2_XXS"),
    "a type that was": (file_of([], [tensor("t", (32,), 4)]), "t .*ggml type 4"),
    "a type to come": (file_of([], [tensor("t", (32,), 1000)]), "t .*ggml type 1000"),
    "an odd offset": (file_of([], [tensor("t", (8,), 0, 16)]), "t begins at offset 16.*32"),
    "beyond the end": (file_of([], [tensor("t", (1025,))]), "truncated.* within t"),
    "far beyond the end": (file_of([], [tensor("t", (8,), 0, 2**64 - 32)]), "truncated.* within t"),
    "nothing beyond the end": (file_of([], [tensor("t", (0,), 0, 2**40)]), "truncated.* within t"),
    **{
        f"alignment {value}": (
            file_of([field("general.alignment", 4, struct.pack("<I", value))], []),
            f"general.alignment is {value}; expected a power of two",
        )
        for value in (0, 3, 48, 2**32 - 1)
    },
    "alignment in 64 bits": (file_of([field("general.alignment", 10, struct.pack("<Q", 32))], []), "alignment is 32; "),
    "alignment in words": (file_of([field("general.alignment", STRING, text("32"))], []), "alignment is '32'; "),
    "alignments": (file_of([field("general.alignment", ARRAY, items(4, 1, bytes(4)))], []), "alignment is Items"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_headers_that_are_refused(tmp_path, case):
    content, message = REFUSED[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(bf.CheckpointError, match=message):
        bf.load(path)


def test_lists_of_strings_that_are_no_utf8_are_still_read(tmp_path):
    """A vocabulary has pieces of characters, some of which writers put in as they are."""
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of([field("a", ARRAY, items(STRING, 2, text(b"\xe9") + text("é")))], []))
    assert bf.load(path).metadata["a"] == ["\ufffd", "é"]


def test_strings_are_read_where_they_end_and_nowhere_else():
    data = np.frombuffer(text("naïve") + text("") + text("𝄞"), np.uint8)
    ends = np.empty(3, np.uint64)
    assert _cpu.string_ends(data, ends) == 3
    assert _cpu.strings(data, ends) == ["naïve", "", "𝄞"]
    for wrong in ([7], [len(data) + 1], [14, 13]):
        with pytest.raises(ValueError, match="ends of other strings"):
            _cpu.strings(data, np.array(wrong, np.uint64))


@pytest.mark.parametrize(
    ("name", "message"), [("m-00001-of-00000.gguf", "1 of 0"), ("m-00003-of-00002.gguf", "3 of 2")]
)
def test_parts_that_cannot_be(tmp_path, name, message):
    for path in {name, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}:
        (tmp_path / path).write_bytes(file_of([], []))
    with pytest.raises(bf.CheckpointError, match=rf"part {message}"):
        bf.load(tmp_path / name)


# ---- what it takes --------------------------------------------------------------------------------------------------


def calls_of(path: Path) -> int:
    """How many functions run, Python's and C's, while a file is opened."""
    count = itertools.count()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: next(count) if event in ("call", "c_call") else None)
    try:
        bf.load(path)
    finally:
        sys.setprofile(before)
    return next(count)


@pytest.mark.parametrize("what", ["fields", "tensors", "words"])
def test_opening_takes_so_many_steps_for_each_field_and_tensor(tmp_path, what):
    """100,000 of them are a matter of seconds: the steps for each are few, and no more among many."""
    counts = []
    for n in (1000, 2000):
        fields = [field(f"f{i}", 4, bytes(4)) for i in range(n)] if what == "fields" else []
        words = b"".join(text(f"w{i}") for i in range(n))
        fields += [field("words", ARRAY, items(STRING, n, words))] if what == "words" else []
        tensors = [tensor(f"t{i}", (32,), 2, 32 * i) for i in range(n)] if what == "tensors" else []
        path = tmp_path / f"{n}.gguf"
        path.write_bytes(file_of(fields, tensors, 32 * n))
        counts.append(calls_of(path))
    assert counts[1] - counts[0] <= 1000 * (60 if what == "tensors" else 20)
    assert counts[1] <= 2.1 * counts[0]


def test_gguf_is_read_without_the_library(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf", Small())
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not there
    ck = bf.load(tmp_path / "m.gguf")
    assert bf.dequantize(ck["output.weight"]).shape == (261, 64)
    assert len(list(load(tmp_path / "m.gguf").generate([5], max_tokens=2))) <= 2


# ---- types that we do not read --------------------------------------------------------------------------------------

UNREAD = [type_.name for type_ in GGML_TYPES.values() if type_.name not in (*ggml_names(), *PLAIN.values())]


def write_unread(path: Path, kinds: list[str], seed: int = 0) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for kind in kinds:
        nbytes = GGML_TYPES[NUMBERS[kind]].block_bytes
        data = np.random.default_rng(seed).integers(0, 256, (4, 2 * nbytes), np.uint8)
        shape = (4, 2 * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])  # in the library's bytes
        writer.add_tensor_info(kind, shape, data.dtype, data.nbytes, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.tensors[-1][kind].tensor = data
    writer.add_tensor("plain", np.arange(8, dtype=np.float32))
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    writer.add_tensor("q4_0", bf.quantize(gaussian((4, 64)), "q4_0").storage["blocks"], raw_dtype=q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_types_that_are_not_read_are_listed(tmp_path, capsys):
    assert {"IQ2_XXS", "TQ1_0", "Q8_K", "IQ3_XXS", "Q1_0"} <= set(UNREAD)
    write_unread(tmp_path / "m.gguf", UNREAD)
    ck = bf.load(tmp_path / "m.gguf")
    assert list(ck) == [*UNREAD, "plain", "q4_0"]
    for kind in UNREAD:
        _, block, nbytes = GGML_TYPES[NUMBERS[kind]]
        about = ck.describe(kind)
        assert (about.unsupported, about.shape) == (f"ggml's {kind}", (4, 2 * block))
        assert about.nbytes == 8 * nbytes
        with pytest.raises(bf.CheckpointError, match=rf"{kind}.*ggml's {kind}"):
            ck[kind]
    assert ck["plain"].tolist() == list(range(8))
    assert main(["inspect", str(tmp_path / "m.gguf")]) == 0
    assert "not supported: ggml's IQ2_XXS" in capsys.readouterr().out


def test_whether_a_tensor_is_there_is_known_without_reading_it(tmp_path, monkeypatch):
    write_unread(tmp_path / "m.gguf", ["IQ2_XXS"])
    ck = bf.load(tmp_path / "m.gguf")
    monkeypatch.setattr(bf.Checkpoint, "read", None)  # whoever reads fails
    assert "IQ2_XXS" in ck
    assert "IQ2_XXS" in ck.keys()  # noqa: SIM118
    assert "other" not in ck
    assert 5 not in ck
    monkeypatch.undo()
    assert ck.get("other") is None
    with pytest.raises(bf.CheckpointError, match="IQ2_XXS"):
        ck.get("IQ2_XXS")


def test_whether_a_field_is_there_is_known_without_decoding_it(tmp_path, monkeypatch):
    write_model(tmp_path / "m.gguf", Small())
    metadata = bf.load(tmp_path / "m.gguf").metadata
    monkeypatch.setattr(Metadata, "__getitem__", None)
    assert "tokenizer.ggml.tokens" in metadata
    assert "tokenizer.ggml" not in metadata


def test_verify_does_not_compare_what_it_cannot_read(tmp_path, capsys):
    for i, name in enumerate("ab"):
        write_unread(tmp_path / f"{name}.gguf", ["IQ2_XXS", "TQ1_0"], seed=i)
    assert main(["verify", str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "IQ2_XXS: not compared: ggml's IQ2_XXS",
        "TQ1_0: not compared: ggml's TQ1_0",
        "plain: equal bits",
        "q4_0: equal bits",
        "",
        "4 tensors:",
        "  equal bits    2",
        "  equal values  0",
        "  different     0",
        "  only in A     0",
        "  only in B     0",
        "  not compared  2",
        "different",
    ]


def test_run_names_the_tensor_and_the_types_that_run(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    write_model(path, Small(hidden=256))
    data = path.read_bytes()
    at = data.index(text("blk.1.ffn_up.weight")) + len(text("blk.1.ffn_up.weight")) + 4 + 16
    assert data[at : at + 4] == struct.pack("<I", NUMBERS["Q8_0"])
    path.write_bytes(data[:at] + struct.pack("<I", NUMBERS["IQ2_XXS"]) + data[at + 4 :])
    assert main(["run", str(path), "-p", "a"]) == 2
    types = (
        "Supported are Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, NVFP4, Q4_K, Q5_K, Q6_K, Q2_K, "
        "Q3_K, IQ4_XS, F32, F16, BF16."
    )
    expected = f"billfish: llm.load: blk.1.ffn_up.weight is not supported: ggml's IQ2_XXS. {types}\n"
    assert capsys.readouterr().err == expected
    assert "blk.1.ffn_up.weight" in bf.load(path)


# ---- writing --------------------------------------------------------------------------------------------------------


def test_a_written_header_is_the_librarys_to_the_byte(tmp_path):
    fields = {
        "general.name": ("Fisch", STRING, None),
        "general.architecture": ("llama", STRING, None),
        "tokens": (["a", "", "ö"], ARRAY, STRING),
        "kinds": ([1, -3], ARRAY, 5),
        "flags": ([True, False], ARRAY, 7),
        **{f"number {kind}": (1, kind, None) for kind in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)},
    }
    tensors = [("a", "F32", (3, 5)), ("b", "Q4_0", (2, 7, 64)), ("c", "BF16", (9,)), ("d", "NVFP4", (5, 128))]
    writer = gguf.GGUFWriter(tmp_path / "theirs", "llama")
    for name, (value, kind, items_kind) in fields.items():
        if name != "general.architecture":
            kinds = gguf.GGUFValueType(kind), items_kind and gguf.GGUFValueType(items_kind)
            writer.add_key_value(name, value, *kinds)
    for name, kind, shape in tensors:
        number = gguf.GGMLQuantizationType[kind]
        size, nbytes = gguf.GGML_QUANT_SIZES[number]
        in_bytes = (*shape[:-1], shape[-1] // size * nbytes)
        raw = {} if kind == "F32" else {"raw_dtype": number}
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        writer.add_tensor_info(name, shape if kind == "F32" else in_bytes, dtype, int(np.prod(in_bytes)), **raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    theirs = (tmp_path / "theirs").read_bytes()
    assert header_bytes(fields, tensors) == theirs + bytes(-len(theirs) % 32)


@pytest.mark.parametrize(
    ("value", "kind"), [(-1, 4), (1 << 40, 4), (1e300, 6), ("\ud800", STRING), (["a", "\udfff"], ARRAY), ("x", 4)]
)
def test_a_field_that_its_type_cannot_hold_is_named(value, kind):
    with pytest.raises(bf.CheckpointError, match=r"general\.odd"):
        header_bytes({"general.odd": (value, kind, STRING if kind == ARRAY else None)}, [])


def test_a_file_without_an_architecture_is_no_model_to_convert(tmp_path):
    """Such as an imatrix file."""
    name = field("general.name", STRING, text("x"))
    (tmp_path / "a.gguf").write_bytes(file_of([name], [tensor("t", (32, 2))], 256))
    with pytest.raises(bf.CheckpointError, match=r"no general\.architecture"):
        bf.convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "gguf", progress=False)


def test_a_tokenizer_without_merges_is_written(tmp_path):
    write_random(tmp_path / "m", "llama")
    about = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    about["model"]["merges"] = []
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(about))
    bf.quantize_checkpoint(tmp_path / "m", tmp_path / "m.gguf", "q8_0", method="rtn", progress=False)
    assert bf.load(tmp_path / "m.gguf").metadata["tokenizer.ggml.merges"] == []
    assert_read_as_by_the_library(tmp_path / "m.gguf")
    assert load(tmp_path / "m.gguf").tokenizer.encode("ab") == load(tmp_path / "m").tokenizer.encode("ab")
