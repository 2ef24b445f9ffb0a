"""docs/pictures: each file is what its script draws, no text is cut off or covered, layouts are those of the code."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import billfish as bf
from benchmarks.machine import Limits
from benchmarks.pictures import PICTURES, diagrams, formats, layouts
from benchmarks.pictures.charts import roofline
from benchmarks.pictures.svg import SMALLEST, Axis, Drawing
from billfish.backends.cpu import _cpu

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture(scope="module")
def drawn():
    return {name: draw() for name, draw in PICTURES.items()}


def test_every_picture_is_what_its_script_draws(drawn):
    assert {path.stem for path in FOLDER.glob("*.svg")} == drawn.keys()
    for name, drawing in drawn.items():
        assert (FOLDER / f"{name}.svg").read_text() == str(drawing), f"{name}: python -m benchmarks.pages"


@pytest.mark.parametrize("name", PICTURES)
def test_texts_can_be_read(drawn, name):
    drawing = drawn[name]
    for label in drawing.labels:
        assert label.left >= 0, label
        assert label.right <= drawing.width, label
        assert label.bottom <= drawing.height, label
    for a, b in combinations(drawing.labels, 2):
        apart = a.right <= b.left or b.right <= a.left or a.bottom <= b.top or b.bottom <= a.top
        assert apart, (a.text, b.text)
    root = ElementTree.fromstring(str(drawing))
    sizes = [float(text.get("font-size")) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert min(sizes) >= SMALLEST


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_have_two_colour_schemes_and_load_nothing(drawn, name):
    text = str(drawn[name])
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"href|url\(|<script|@import", text)
    used = set(re.findall(r"\b[fs]-(\w+)", text.partition("</style>")[2]))
    assert used - {"none"} <= set(re.findall(r"--(\w+):", text))


def test_a_text_that_leaves_its_box_is_an_error():
    drawing = Drawing(100, 100, "title", "about")
    with pytest.raises(AssertionError, match="far too long"):
        drawing.box(0, 0, 60, 60, "far too long for this")


@pytest.mark.parametrize("name", [name for names in formats.FAMILIES.values() for name in names])
def test_every_bit_of_a_format_has_one_meaning(name):
    format = bf.FORMATS[name]
    found = Counter(bit for array in formats.bits_of(format) for bit in array)
    codes = {(bit.index, bit.place) for bit in found if bit.plane == "codes"}
    assert set(found.values()) == {1}
    assert codes == {(k, place) for k in range(formats.WEIGHTS) for place in range(format.element.bits)}
    assert len(found) == format.bits_per_weight(format.default_group_size) * formats.WEIGHTS


def test_the_stream_is_that_of_the_kernels():
    if not _cpu.levels()[0].startswith("neon"):
        pytest.skip("the picture has NEON's tiles")
    q = bf.quantize(np.random.default_rng(0).standard_normal((layouts.TILE, layouts.BLOCK), np.float32), "q4_0")
    stream = np.frombuffer(np.ascontiguousarray(bf.prepack(q).data), np.uint8)
    scales, codes = stream[: layouts.SCALES], stream[layouts.SCALES : layouts.SCALES + layouts.CODES]
    planes = q.format.unpack(q.storage)
    assert scales.view(np.float16).tolist() == planes["scale"][:, 0].tolist()
    for row in range(layouts.TILE):
        for k in range(layouts.BLOCK):
            byte, bit = layouts.stream_place(row, k)
            stored = planes["codes"][row, k] ^ (8 if bit else 0)  # less 8, in four bits
            assert codes[byte] >> bit & 15 == stored


def test_a_brick_holds_each_code_once():
    places = layouts.brick_places()
    assert len(set(places.values())) == len(places) == 16 * 128
    assert {byte for byte, _ in places.values()} == set(range(layouts.Q4_0.code_bytes))


def test_requests_of_the_picture_are_served_whole():
    for request, cells in diagrams.simulate():
        assert sum(int(cell) for cell in cells if cell.isdecimal()) == request.prompt
        assert (request.read, request.answer) == (request.prompt, 0)


def test_the_rooms_are_those_of_the_contract():
    assert {room for floor in diagrams.layers() for room in floor} == diagrams.ROOMS.keys()


def test_a_roofline_of_one_record():
    record = {"format": "q4_0", "activations": "q8", "m": 1, "k": 64, "n": 32, "seconds": 2.0, "gops": 8.0}
    record |= {"weight_gbps": 4.0, "peers": {"ggml": 4.0}}
    drawing = roofline([record], Limits(10e9, 100e9, 25e9), {"cpu": "Abacus", "date": "2026-01-31"}, title="Beads")
    text = str(drawing)
    assert all(
        word in text for word in ("Abacus, 2026-01-31", "q4_0, int8", "64 x 32", "10 GB/s", "100 GOP/s", ">ggml<")
    )
    ours, peer = (float(y) for y in re.findall(r'<circle[^>]* cy="([\d.]+)"', text)[-1:-3:-1])
    assert ours < peer  # higher up


def test_an_axis_maps_and_ticks():
    axis = Axis(1, 100, 0, 200, log=True)
    assert [axis(value) for value in (1, 10, 100)] == pytest.approx([0, 100, 200])
    assert axis.ticks() == [1, 10, 100]
    assert Axis(15, 90, 0, 1, log=True).ticks() == [20, 50]
