"""The page as data, and in a real browser."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rows import cell

from dap_bench import summarize
from dap_bench.report.page import write_page
from dap_bench.report.rows import load_rows

CHROMIUM = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def page(tmp_path):
    """Three methods on three images of two classes, and a figure."""
    maps = [[0.0, 1.0, 2.0, 1.0]] * 3
    for method, values in (("dap", [0.1, 0.3, 0.2]), ("ar", [0.2, 0.25, 0.4]), ("constructor", [0.9, 0.8, 0.95])):
        cell(tmp_path / "rows", method, values, map=maps, labels=[0, 1, 0])
    Image.new("RGB", (40, 20)).save(tmp_path / "figure.png")
    rows, summary = load_rows(tmp_path / "rows"), summarize(tmp_path / "rows")
    return write_page(tmp_path / "page.html", rows, summary, None, {"a figure": tmp_path / "figure.png"}, images=3)


def test_the_page_holds_the_rows_and_escapes_names(page):
    text = page.read_text()
    assert "<b>cat" not in text
    assert "<!--" not in text
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)[1])
    (group,) = data["groups"]
    assert [row["method"] for row in group["rows"]] == ["ar", "dap", "constructor"]
    assert group["rows"][1]["values"]["deletion"]["mean"] == pytest.approx(0.2)
    assert group["rows"][1]["values"]["deletion"]["place"] == 1
    assert [sample["id"] for sample in data["samples"]] == ["s0", "s1", "s2"]
    assert data["samples"][0]["label"] == "</script><b>cat"
    assert data["samples"][0]["photo"] is None
    assert data["samples"][0]["methods"]["dap"]["grid"] == [2, 2]
    assert not re.search(r"(src|href)=\"http", text)
    assert data["cells"][0]["command"] == "python -m dap_bench method=ar"


def test_rows_of_which_some_have_no_map(tmp_path):
    """Kept maps were asked for only at the second attempt."""
    cell(tmp_path, "dap", [0.1, 0.3], map=[None, [0.0, 1.0, 2.0, 1.0]])
    cell(tmp_path, "ar", [0.1, 0.3], map=[[0.0, 1.0, 2.0, 1.0], None])
    page = write_page(tmp_path / "page.html", load_rows(tmp_path), summarize(tmp_path), None, {}, images=3)
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert [list(sample["methods"]) for sample in data["samples"]] == [["ar"], ["dap"]]


def test_maps_are_not_made_again_for_images_that_a_cell_has_not_measured(tmp_path, monkeypatch):
    """AR kept its maps; DAP did not, and has measured one image so far."""
    maps = [[0.0, 1.0, 2.0, 1.0]] * 2
    cell(tmp_path, "ar", [0.1, 0.3], map=maps)
    cell(tmp_path, "dap", [0.1])
    made = SimpleNamespace(rows=pd.DataFrame(index=["s0"]), maps=lambda name: {"dap": (np.eye(2), True)})
    monkeypatch.setattr("dap_bench.report.page.Redraw.of", lambda *_: made)
    page = write_page(tmp_path / "page.html", load_rows(tmp_path), summarize(tmp_path), None, {}, images=3)
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert [list(sample["methods"]) for sample in data["samples"]] == [["ar", "dap"], ["ar"]]


@pytest.fixture
def browser(tmp_path):
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no chromium and chromedriver here; `make tools` installs them")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in [*CHROMIUM, f"--user-data-dir={tmp_path / 'profile'}"]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def test_in_a_browser(page, browser):
    from selenium.webdriver.support.select import Select

    def texts(selector):
        return [found.text.split("\n")[0] for found in browser.find_elements("css selector", selector)]

    browser.get(page.as_uri())
    column = "table tbody td:first-child"
    assert texts(column) == ["AR", "DAP", "constructor"]  # which every object of JavaScript has
    deletion = browser.find_element("xpath", "//th//button[starts-with(., 'Del')]")
    deletion.click()
    assert texts(column) == ["DAP", "AR", "constructor"]  # less is better: the best first
    deletion.click()
    assert texts(column) == ["constructor", "AR", "DAP"]

    assert len(texts("#gallery .card")) == 3
    Select(browser.find_element("name", "method")).select_by_visible_text("DAP")
    Select(browser.find_element("name", "sort by")).select_by_visible_text("Del")
    assert texts("#gallery .card") == ["Del 0.100", "Del 0.200", "Del 0.300"]
    Select(browser.find_element("name", "class")).select_by_value("dog")
    assert texts("#gallery .card") == ["Del 0.300"]

    browser.find_element("css selector", "#gallery .card").click()
    assert browser.find_element("id", "viewer-title").text == "s1: dog, predicted dog (50.0 %)"
    assert texts("#viewer-body .card strong") == ["photo", "AR", "DAP", "constructor"]
    painted = "return Math.max(...arguments[0].getContext('2d').getImageData(0, 0, 160, 160).data.slice(0, 4000))"
    canvas = browser.find_elements("css selector", "#viewer-body canvas")[1]
    assert browser.execute_script(painted, canvas) == 255
    browser.find_element("css selector", "#viewer button").click()
    assert not browser.find_element("id", "viewer").is_displayed()
    assert browser.execute_script("return document.querySelector('figure img').naturalWidth") == 40
    assert browser.get_log("browser") == []
    inject = "const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s)"
    browser.execute_script(inject)
    assert browser.execute_script("return window.hit") is None  # the page's policy lets only its own script run

    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390  # nothing sticks out
