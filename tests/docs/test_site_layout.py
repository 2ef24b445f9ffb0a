"""The site in a real browser: no table is cut on a laptop, no page is wider than a phone, the search finds names."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_support import browser, built_site

pytest.importorskip("selenium", reason="needs selenium")
pytest.importorskip("sphinx", reason="needs billfish[docs]")

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CUT = """
return [...document.querySelectorAll(".table-wrapper")]
  .filter((table) => table.scrollWidth > table.clientWidth + 1)
  .map((table) => table.innerText.slice(0, 60));
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    opened = browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.quit()


def set_width(driver, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def pages() -> list[Path]:
    """All pages but copies of source files."""
    site = built_site()
    return [
        path for path in sorted(site.rglob("*.html")) if path.relative_to(site).parts[0] not in ("source", "_modules")
    ]


@pytest.mark.full
def test_no_table_is_cut_on_a_laptop_and_no_page_is_wider_than_a_phone(driver):
    cut, wide = {}, []
    for path in pages():
        set_width(driver, 1400)
        driver.get(path.as_uri())
        cut |= {path.name: found} if (found := driver.execute_script(CUT)) else {}
        set_width(driver, 390)
        if driver.execute_script("return document.documentElement.scrollWidth > innerWidth"):
            wide.append(path.name)
    assert (cut, wide) == ({}, [])


def test_the_search_finds_a_name(driver):
    set_width(driver, 1400)
    driver.get(f"{(built_site() / 'search.html').as_uri()}?q=quantize_model")
    found = WebDriverWait(driver, 20).until(lambda it: it.find_elements(By.CSS_SELECTOR, "#search-results li a"))
    assert any("api/layers.html" in link.get_attribute("href") for link in found)
