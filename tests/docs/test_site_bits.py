"""The page "Bits" in a real browser: what it shows is what `billfish explain` prints, for every format and code."""

from __future__ import annotations

import io
import json
import re
from itertools import groupby
from urllib.parse import urlsplit

import ml_dtypes
import numpy as np
import pytest
from cases import diagonal
from site_support import browser, built_site

import billfish as bf
from billfish.cli.explain import explain, record, walks

pytest.importorskip("selenium", reason="needs selenium")
pytest.importorskip("sphinx", reason="needs billfish[docs]")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda format: format.name)
SOME_FORMATS = pytest.mark.parametrize("format", diagonal(3, bf.FORMATS.values()))

# What the page shows for each pair of codes (low, high): of both lanes all texts, and of each step its squares.
READ = """
const [states] = arguments;
const root = document.querySelector(".bits");
const texts = (where, selector) => [...where.querySelectorAll(selector)].map((element) => element.textContent);
const squares = (lane) => [...lane.querySelectorAll(".square")].map(
  (square) => [square.textContent, square.className.match(/sign|exponent|mantissa|$/)[0]]);
return states.map((state) => {
  root.show(state);
  return {
    format: texts(root, ".made-of strong")[0],
    madeOf: texts(root, ".made-of")[0],
    held: texts(root, ".held")[0],
    lanes: [0, 1].map((lane) => root.querySelector(`.panel.lane-${lane}`)).map((panel) => ({
      code: texts(panel, ".code-text")[0],
      fields: [...panel.querySelectorAll(".fields tr")].map((row) => texts(row, "th, td")),
      value: texts(panel, ".value")[0],
      hidden: panel.querySelector(".value").hidden,
      command: texts(panel, ".command")[0],
    })),
    walks: [...root.querySelectorAll(".walk")].map((walk) => ({
      title: texts(walk, "h3")[0],
      steps: [...walk.querySelectorAll(".step:not(.head)")].map((step) => ({
        text: texts(step, ".operation")[0],
        word: texts(step, ".word")[0],
        lanes: [...step.querySelectorAll(".lane")].map(squares),
        values: texts(step, ".lane-value"),
      })),
    })),
  };
});
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The page in a browser; at the end, nothing was complained about and nothing was asked of a network."""
    driver = browser(tmp_path_factory.mktemp("profile"))
    try:
        driver.get(address())
        yield driver
        assert driver.get_log("browser") == []
        assert {urlsplit(url).scheme for url in requests(driver)} - {"data"} == {"file"}
    finally:
        driver.quit()


@pytest.fixture
def page(opened):
    """The page as it is at first."""
    return at_state(opened)


def at_state(driver, state: str = ""):
    """The page, opened anew with a state in its address, when it has drawn itself."""
    driver.get("about:blank")
    driver.get(address(state))
    WebDriverWait(driver, 60).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, ".bits .walk .square"))
    return driver


def address(state: str = "") -> str:
    return (built_site() / "bits.html").as_uri() + state


def requests(driver) -> list[str]:
    """All addresses that our pages have asked for; the browser's own page of new tabs is none of them."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [each["request"]["url"] for each in sent if each["documentURL"].startswith("file:")]


def shown(driver, *states) -> list[dict]:
    return driver.execute_script(READ, states)


def now(driver) -> dict:
    return shown(driver, {})[0]


def printed(format, code: int, scale: float, offset: float | None) -> list[str]:
    """The lines of `billfish explain`, each with single spaces."""
    out = io.StringIO()
    explain(format, code, scale, offset, out)
    return [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip()]


def as_printed(seen: dict, lane: int) -> list[str]:
    """The same lines, put together from what the page shows, whose lanes hold the same code."""
    panel = seen["lanes"][lane]
    lines = [f"{seen['format']}, {panel['code']} {seen['madeOf'].removeprefix(seen['format'])}"]
    lines += [" ".join(cells) for cells in panel["fields"]]
    for walk in seen["walks"] if not seen["walks"][0]["title"].startswith("A table") else []:
        lines.append(walk["title"])
        for step in walk["steps"]:
            high, low = step["lanes"]
            if step["values"]:
                parts = ["".join(bit for bit, _ in run) for _, run in groupby(low, key=lambda square: square[1])]
                drawn = [*step["values"], *parts]
            else:
                bits = "".join(bit for bit, _ in [*high, *low])
                drawn = [bits[i : i + 4] for i in range(0, 32, 4)]
            lines.append(" ".join([step["text"], step["word"], *drawn]))
    lines += ["value", seen["held"], panel["value"]]
    return [" ".join(line.split()) for line in lines]


# ---- numbers ----------------------------------------------------------------------------------------------------


@FORMATS
def test_the_page_shows_what_explain_prints(opened, format):
    scale, offset = 0.3, None if format.offset == "none" else -2.5
    codes = range(2**format.element.bits)
    states = [{"format": format.name, "codes": [code, code], "scale": scale, "offset": offset} for code in codes]
    for code, seen in zip(codes, shown(opened, *states), strict=True):
        expected = printed(format, code, scale, offset)
        assert as_printed(seen, 0) == expected
        assert as_printed(seen, 1) == expected


@SOME_FORMATS
def test_lanes_do_not_touch_each_other(opened, format):
    limit = 2**format.element.bits
    pairs = [[int(a), int(b)] for a, b in np.random.default_rng(0).integers(0, limit, (20, 2))]
    states = [{"format": format.name, "codes": pair} for pair in pairs]
    for (low, high), seen in zip(pairs, shown(opened, *states), strict=True):
        assert [lane["code"].split()[1] for lane in seen["lanes"]] == [str(low), str(high)]
        for walk, drawn in zip(walks(format.element), seen["walks"], strict=False):
            steps = record(walk, low, format.element, high)
            assert [step["word"] for step in drawn["steps"]] == [f"0x{step.word:08x}" for step in steps]
            values = [[f"{float(x):.6g}" for x in step.lanes[::-1]] if step.lanes is not None else [] for step in steps]
            assert [step["values"] for step in drawn["steps"]] == values


@SOME_FORMATS
def test_scales_and_offsets_are_held_or_refused_as_in_explain(opened, format):
    random = np.random.default_rng(1)
    scales = [0.0, -0.0, -0.3, 448.0, 465.0, 65504.0, 65519.0, 65520.0, 6e-8, 2.9e-8, 2.0**-127, 1e39, -1e300]
    scales += [float(x) for x in np.exp(random.normal(0, 6, 40))]
    offsets = [None, 0.0, 5.5, 65519.0, 65520.0, 1e-9, *(float(x) for x in random.normal(0, 100, 10))]
    states = [(scale, None) for scale in scales]
    states += [(0.3, offset) for offset in offsets] if format.offset != "none" else []
    named = [{"format": format.name, "codes": [3, 3], "scale": s, "offset": o} for s, o in states]
    for (scale, offset), seen in zip(states, shown(opened, *named), strict=True):
        refused = seen["lanes"][0]["hidden"]
        assert refused == seen["held"].startswith("explain: ")
        if refused:
            with pytest.raises(bf.DataError, match=re.escape(seen["held"])):
                printed(format, 3, scale, offset)
        else:
            assert as_printed(seen, 0)[-2:] == printed(format, 3, scale, offset)[-2:]


NUMBERS = [0.5, 1024.125, 1024.375, 123456.5, 1e-5, 9.9999995e-5, 2.0**-149, -1e16, 65504.0, 0.1, 1 / 3, 999999.5]


@pytest.mark.parametrize("digits", [6, 9])
def test_numbers_are_written_as_in_python(opened, digits):
    numbers = [*NUMBERS, *(float(x) for x in np.float16(np.random.default_rng(2).normal(0, 1e3, 300)))]
    machine = 'bitsMachine(JSON.parse(document.getElementById("bits-programs").textContent))'
    script = f"const m = {machine}; return arguments[0].map((x) => m.general(x, arguments[1]));"
    assert opened.execute_script(script, numbers, digits) == [f"{x:.{digits}g}" for x in numbers]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_rounding_to_sixteen_bits(opened, kind):
    dtype = np.dtype(np.float16 if kind == "float16" else ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):  # NaN
        every = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    between = (every[:-1] + every[1:]) / 2
    numbers = np.concatenate([every, between, np.nextafter(between, -np.inf), np.nextafter(between, np.inf)])
    machine = 'bitsMachine(JSON.parse(document.getElementById("bits-programs").textContent))'
    script = f"const m = {machine}, k = arguments[1]; return arguments[0].map((x) => m.toBits(k, m.round(k, x)));"
    got = np.array(opened.execute_script(script, numbers.tolist(), kind), np.uint16)
    # Float64 to bfloat16 goes over float32 in ml_dtypes and would round twice; ties are decided here.
    expected = nearest(numbers, every).astype(dtype)
    np.testing.assert_array_equal(got, expected.view(np.uint16))


def nearest(x: np.ndarray, every: np.ndarray) -> np.ndarray:
    """The nearest of `every` finite float of 16 bits, in order; of two as near, that with an even last bit."""
    at = np.clip(np.searchsorted(every, x), 1, len(every) - 1)
    low, high = every[at - 1], every[at]
    below, above = x - low, high - x
    zero = int(np.searchsorted(every, 0.0))
    even_low = (at - 1 - zero) % 2 == 0  # patterns count up from zero
    chosen = np.where((below < above) | ((below == above) & even_low), low, high)
    return np.copysign(chosen, x)


# ---- hands ------------------------------------------------------------------------------------------------------


def squares(driver, selector: str) -> list:
    return driver.find_elements(By.CSS_SELECTOR, f"{selector} button.square")


def test_clicks_on_bits_and_formats(page):
    assert now(page)["lanes"][0]["command"] == "billfish explain fp4 0b1011 --scale 0.3"
    squares(page, ".panel.lane-0")[0].click()  # the sign
    assert now(page)["lanes"][0]["value"] == "1.5 * 0.300048828 = 0.450073242"
    squares(page, ".panel.lane-1")[3].click()
    assert now(page)["lanes"][1]["code"] == "code 7 = 0b0111"
    squares(page, ".walk .step.start .lane:last-child")[3].click()  # the first walk's word, low lane
    seen = now(page)
    assert seen["lanes"][0]["code"] == "code 2 = 0b0010"
    assert seen["walks"][0]["steps"][0]["word"] == "0x70002000"
    for name in ("q8_0", "iq4_nl", "q2_k", "u4"):
        page.find_element(By.CSS_SELECTOR, f"input[value={name}]").click()
        assert now(page)["format"] == name
        assert now(page)["lanes"][0]["code"] == f"code 2 = 0b{2:0{bf.FORMATS[name].element.bits}b}"
    squares(page, ".number:nth-of-type(2)")[0].click()  # the sign of the zero point
    assert now(page)["lanes"][0]["value"] == "(2 - -8) * 0.300048828 = 3.00048828"


def test_clicks_on_the_bits_of_a_scale(page):
    for name, before, after in (("fp4", 0.3, 0.6), ("mxfp4", 0.25, 0.5), ("nvfp4", 0.3125, 0.625)):
        at_state(page, f"#{name}/0010/0010/{before}")
        bits = squares(page, ".number")
        # One more in the exponent: its last bit is 1, so it and those above it flip until one was 0.
        fields = [bit.get_attribute("class") for bit in bits]
        last = max(i for i, field in enumerate(fields) if "exponent" in field)
        while bits[last].text == "1":
            bits[last].click()
            last -= 1
        bits[last].click()
        assert f" is {after:.4g}"[:6] in now(page)["held"]


def test_numbers_are_typed(page):
    typed = page.find_element(By.ID, "bits-scale")
    typed.send_keys(Keys.CONTROL, "a")
    typed.send_keys("1e10")
    assert "--scale 1e+10" in now(page)["held"]
    assert "f16" in now(page)["held"]
    typed.send_keys(Keys.CONTROL, "a")
    typed.send_keys("-2")
    assert now(page)["held"] == "scale -2, held as f16, is -2"
    assert now(page)["lanes"][0]["value"] == "-1.5 * -2 = 3"


def test_the_keyboard_is_enough(page):
    page.execute_script("document.querySelector('.formats input:checked').focus()")
    keys = ActionChains(page)
    keys.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.TAB).perform()  # there and back, then the high lane
    assert now(page)["format"] == "fp4"
    assert page.switch_to.active_element.get_attribute("aria-label") == "bit 3, sign"
    ActionChains(page).send_keys(Keys.SPACE, Keys.ARROW_RIGHT, "0", "0", Keys.END, Keys.ENTER).perform()
    assert now(page)["lanes"][1]["code"] == "code 11 = 0b1011"
    active = page.switch_to.active_element
    assert (active.get_attribute("aria-label"), active.get_attribute("aria-pressed")) == ("bit 0, mantissa", "true")
    ActionChains(page).send_keys(Keys.TAB, Keys.HOME, "0", Keys.TAB).perform()
    assert now(page)["lanes"][0]["code"] == "code 3 = 0b0011"
    assert page.switch_to.active_element.get_attribute("id") == "bits-scale"


def test_the_address_holds_what_is_shown(page):
    squares(page, ".panel.lane-0")[0].click()
    page.execute_async_script("setTimeout(arguments[0], 500)")
    assert page.current_url == address("#fp4/0011/0110/0.3")
    at_state(page, "#q4_1/1111/0001/0.5/-3")
    assert [lane["value"] for lane in now(page)["lanes"]] == ["15 * 0.5 + -3 = 4.5", "1 * 0.5 + -3 = -2.5"]


@pytest.mark.parametrize("width", [360, 820, 1280])
def test_it_fits_the_screen(page, width):
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for name in ("fp4", "q8_0", "nvfp4_gguf", "q5_k"):
            shown(page, {"format": name})
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_search_works_from_the_disk(page):
    page.get((built_site() / "search.html").as_uri() + "?q=nibble")
    found = "return document.querySelectorAll('#search-results li a').length"
    for _ in range(100):
        if page.execute_script(found):
            break
        page.execute_async_script("setTimeout(arguments[0], 100)")
    links = page.find_elements(By.CSS_SELECTOR, "#search-results li a")
    assert any(re.search(r"format-bits\.html", link.get_attribute("href")) for link in links)
