"""The page as data, and as a person uses it in a real browser."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from cells import run
from rows import cell

from dap_bench import summarize
from dap_bench.config import CONF
from dap_bench.data import shapes
from dap_bench.report import browser as browsing
from dap_bench.report.compare import compare, published
from dap_bench.report.layouts import labels
from dap_bench.report.page import Options, write_page
from dap_bench.report.rows import load_rows

PAPER = Path(__file__).parents[2] / "results" / "paper"
MAP = [0.0, 1.0, 2.0, 1.0]
METHODS = {"dap": [0.1, 0.3, 0.2], "ar": [0.2, 0.25, 0.4], "constructor": [0.9, 0.8, 0.95]}


def content(page):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def page_of(folder, **options):
    out = folder / "page.html"
    return write_page(out, load_rows(folder), summarize(folder), None, {}, Options(device="cpu", **options))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three methods with kept maps on three toy images, and two on four of the bundled model, two with pictures."""
    place = tmp_path_factory.mktemp("page")
    rows = place / "rows"
    for method, values in METHODS.items():
        curves = {"deletion_curve": [[1.0, 0.5, 0.0]] * 3, "insertion_curve": [[0.0, 0.25, 1.0]] * 3}
        classes = {"labels": [0, 1, 0], "alternative": [0] * 3}
        cell(rows, method, values, map=[MAP] * 3, **curves, **classes)
    for method in ("gradcam", "ar"):
        run(rows, place / "cache", "sampler.n=4", method=method)
    summary = summarize(rows)
    compared = compare(summary, published(PAPER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAP_BENCH_CACHE", str(place / "another cache"))  # the images are drawn again
        patch.delenv("DAP_BENCH_ASSETS", raising=False)
        options = Options(pictures=2, device="cpu")
        page = write_page(place / "page.html", load_rows(rows), summary, compared, {}, options)
    return SimpleNamespace(page=page, rows=rows, summary=summary, compared=compared, place=place)


def test_the_page_holds_the_rows_and_escapes_names(made):
    text = made.page.read_text()
    assert "<b>cat" not in text
    assert "<!--" not in text
    assert not re.search(r"(src|href)=\"http", text)
    real, toy = content(made.page)["groups"]
    assert [row["method"] for row in toy["rows"]] == ["ar", "dap", "constructor"]
    assert toy["rows"][1]["values"]["deletion"]["mean"] == pytest.approx(0.2)
    assert toy["rows"][1]["values"]["deletion"]["place"] == 1
    assert [sample["id"] for sample in toy["samples"]] == ["s0", "s1", "s2"]
    assert toy["samples"][1]["values"] == {method: [values[1]] for method, values in METHODS.items()}
    assert toy["samples"][0]["maps"]["dap"] == ["2 2 1 AID/gA=="]  # bytes 0, 128, 255, 128
    assert toy["classes"][0] == "</script><b>cat"
    assert toy["cells"][0]["command"] == "python -m dap_bench method=ar"
    assert ["photo" in sample for sample in real["samples"]] == [True, False, False, True]  # evenly spread
    assert {len(maps) for maps in real["samples"][0]["maps"].values()} == {2}  # predicted and runner-up


def test_pictures_are_made_only_when_asked_for(tmp_path, monkeypatch):
    cell(tmp_path, "dap", [0.1, 0.3])
    monkeypatch.setattr(browsing, "Redraw", None)
    (group,) = content(page_of(tmp_path, again="python -m dap_bench.report pictures=24"))["groups"]
    assert group["notes"] == [
        {
            "text": "There are no pictures: none were asked for. This adds some:",
            "command": "python -m dap_bench.report pictures=24",
        }
    ]
    assert [sample["values"]["dap"] for sample in group["samples"]] == [[0.1], [0.3]]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("pictures=some", "pictures=some must be an integer of at least 0"),
        ("images=0", "images=0 must be an integer of at least 1"),
        ("device=gpu", "device=gpu"),
    ],
)
def test_a_mistake_is_one_sentence(option, sentence, monkeypatch, capsys):
    from dap_bench.report.__main__ import main

    monkeypatch.setattr("sys.argv", ["report", option])
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert sentence in error
    assert error.count("\n") == 1


def test_figures_are_called_by_words(tmp_path):
    from dap_bench.report.__main__ import drawn

    for stem in (
        "layers-vit_t-balanced-cat.jpg",
        "cases-best-vit_t-balanced",
        "cases-best-vit_s-balanced",
        "curves-vit_t-balanced",
    ):
        (tmp_path / f"{stem}.png").touch()
    summary = pd.DataFrame({"model": ["vit_t"], "sampler": ["balanced"]})
    assert list(drawn(tmp_path, summary)) == [
        "Maps by layer, ViT-T, balanced, cat.jpg",
        "The best cases, ViT-T, balanced",
    ]


def test_rows_of_which_some_have_no_map(tmp_path):
    """Kept maps were asked for only at the second attempt."""
    cell(tmp_path, "dap", [0.1, 0.3], map=[None, MAP])
    cell(tmp_path, "ar", [0.1, 0.3], map=[MAP, None])
    (group,) = content(page_of(tmp_path))["groups"]
    assert [list(sample["maps"]) for sample in group["samples"]] == [["ar"], ["dap"]]


def test_what_is_not_measured_is_not_drawn_but_named(tmp_path, monkeypatch):
    """AR kept its maps and failed once; DAP did not, and has measured one image so far."""
    cell(tmp_path, "ar", [0.1, 0.3], map=[MAP] * 2)
    cell(tmp_path, "dap", [0.1])
    cell(tmp_path, "cdam", [0.1, None], status=["ok", "failed"], reason=[None, "out of memory"], map=[MAP, None])
    drawn = {"left_out": {}, "photo": lambda name: shapes.draw(0, 0)[0]}
    drawn["maps"] = lambda name, methods: {method: [(np.eye(2), True)] for method in methods}
    monkeypatch.setattr(browsing, "Redraw", lambda *_: SimpleNamespace(**drawn))
    (group,) = content(page_of(tmp_path, pictures=2))["groups"]
    assert [sorted(sample["maps"]) for sample in group["samples"]] == [["ar", "cdam", "dap"], ["ar"]]
    assert group["samples"][1]["why"] == {"dap": "not computed yet", "cdam": "failed: out of memory"}
    assert "CDAM: of its images 1 failed." in [note["text"] for note in group["missing"]]


def test_800_images_of_12_methods_stay_below_30_mb(tmp_path, monkeypatch):
    """With photos and with maps of pixels for both classes, which are the largest."""
    names = [f"m{at}" for at in range(12)]
    random = np.random.default_rng(0)
    for name in names:
        cell(tmp_path, name, random.random(800).tolist())
    photo, pixels = shapes.draw(0, 0)[0], random.random((224, 224))
    drawn = {"left_out": {}, "photo": lambda name: photo}
    drawn["maps"] = lambda name, methods: dict.fromkeys(methods, [(pixels, True)] * 2)
    monkeypatch.setattr(browsing, "Redraw", lambda *_: SimpleNamespace(**drawn))
    encoded = browsing._encoded((pixels, True))
    monkeypatch.setattr(browsing, "_encoded", lambda _: encoded)
    page = page_of(tmp_path, pictures=800)
    (group,) = content(page)["groups"]
    assert sum(len(sample["maps"]) for sample in group["samples"]) == 9600
    assert page.stat().st_size < 30e6


# ---------------------------------------------------------------------- in Chromium


class Person:
    """What a person sees and does."""

    def __init__(self, driver, page):
        self.driver, self.page = driver, page

    def open(self, address="", width=1280, mobile=False):
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.driver.get("about:blank")
        self.driver.get(self.page.as_uri() + address)
        return self

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def texts(self, selector):
        return [found.text.split("\n")[0] for found in self.driver.find_elements("css selector", selector)]

    def press(self, *keys, at="body"):
        self.find(at).send_keys(*keys)

    def choose(self, name, value):
        from selenium.webdriver.support.select import Select

        Select(self.find(f"select[name={name}]")).select_by_value(value)

    def script(self, text, *arguments):
        return self.driver.execute_script(f"return {text}", *arguments)

    def address(self):
        return self.driver.current_url.partition(".html")[2]

    def seen(self):
        """The browser of images, all of it."""
        return self.texts("#image-title, #count, #cards strong, #values td")


@pytest.fixture
def person(browser, made):
    person = Person(browser, made.page)
    yield person
    assert browser.get_log("browser") == []


TOY = "?view=toy-balanced-vit_t"


def test_arrow_keys_go_through_the_images(person):
    from selenium.webdriver.common.keys import Keys

    person.open(TOY)
    seen = []
    for _ in range(4):
        seen.append(
            dict(zip(person.texts("#values td:first-child"), person.texts("#values td:last-child"), strict=True))
        )
        person.press(Keys.ARROW_RIGHT)
    shown = {"ar": "AR", "dap": "DAP", "constructor": "constructor"}  # which every object of JavaScript has
    expected = [{shown[name]: f"{METHODS[name][at]:.3f}" for name in shown} for at in (0, 1, 2, 0)]
    assert seen == expected
    assert person.texts("#count") == ["2 of 3 images"]
    assert person.address() == TOY + "&image=s1"
    person.press(Keys.ARROW_LEFT)
    assert person.texts("#image-title") == ["</script><b>cat, predicted dog (50.0 %), runner-up </script><b>cat"]
    assert person.address() == TOY + "&image=s0"
    person.find("#browser button").click()
    assert person.address() == TOY + "&image=s2"
    person.choose("image", "s1")
    assert person.texts("#image-title") == ["dog, predicted dog (50.0 %), runner-up </script><b>cat"]


def test_what_is_chosen_is_in_the_address_and_comes_back(person):
    person.open(TOY)
    person.choose("order", "deletion")
    listed = "select[name=image] option"
    assert [text.split(":")[0] for text in person.texts(listed)] == ["s0", "s2", "s1"]  # of the reference, DAP
    person.choose("of", "constructor")
    assert [text.split(":")[0] for text in person.texts(listed)] == ["s1", "s0", "s2"]
    assert person.texts("#values td.best") == ["0.250"]
    person.driver.find_element("xpath", "//section[@id='browser']//label[contains(., 'AR')]/input").click()
    assert person.texts("#cards strong") == ["Photo", "DAP", "constructor"]
    person.press("dog", "\n", at="input[name=class]")
    assert person.texts("#count") == ["1 of 3 images"]  # what is predicted counts too
    person.find("input[name=class]").clear()
    person.press("cat", "\n", at="input[name=class]")
    assert person.texts("#count") == ["1 of 2 images"]
    person.press("\ue014")  # the right arrow
    before, address = person.seen(), person.address()
    assert address == TOY + "&image=s2&class=cat&order=deletion&of=constructor&hidden=ar"
    person.open(address)
    assert person.seen() == before
    person.open(TOY + "&class=0")  # by its number
    assert person.texts("#count") == ["1 of 2 images"]
    person.open(TOY + "&class=horse")
    assert person.texts("#count") == ["No image is of this class."]


def test_pictures_with_a_slider_for_both_classes(person, made):
    person.open()
    (group,) = (group for group in content(made.page)["groups"] if group["model"] == "vit_shapes")
    assert person.texts("#count") == ["1 of 2 images"]  # that have pictures
    assert person.texts("#cards strong") == ["Photo", "AR", "Grad-CAM"]
    canvas = "document.querySelectorAll('#cards canvas')[1]"
    opacity = f"getComputedStyle({canvas}).opacity"
    assert person.script(opacity) == "0.6"
    person.press("\ue014\ue014", at="input[name=opacity]")  # arrows move the slider, not the image
    assert person.script(opacity) == "0.7"
    assert person.address() == "?opacity=70"
    pixels = f"[...{canvas}.getContext('2d').getImageData(0, 0, 14, 14).data]"
    assert person.script("document.querySelector('#cards img').naturalWidth") == browsing.THUMBNAIL
    maps = group["samples"][0]["maps"]["gradcam"]
    for which, expected in (("predicted", maps[0]), ("runner-up", maps[1])):
        person.choose("explain", which)
        red = np.array(person.script(pixels)).reshape(-1, 4)[:, :3].sum(1)
        decoded = np.frombuffer(browsing.base64.b64decode(expected.split(" ")[3]), np.uint8)
        assert red.argmax() == decoded.argmax()
        assert pd.Series(red).corr(pd.Series(decoded.astype(float)), "spearman") > 0.999
    assert maps[0] != maps[1]
    person.find("#browser .check input").click()
    assert person.texts("#count") == ["1 of 4 images"]


def test_contents_and_permalinks(person):
    person.open(TOY)
    titles = [text.removesuffix(" #") for text in person.texts("h2")]
    assert person.texts("#contents a") == titles
    assert titles[:3] == ["Images", "Results", "Comparison with the paper"]
    assert person.texts("#results h3")[1] == "ViT-T, balanced draw of toy #"
    person.driver.find_element("link text", "Curves").click()
    assert person.address() == TOY + "#curves"
    assert abs(person.script("document.getElementById('curves').getBoundingClientRect().top")) < 2
    person.open("#comparison-deletion")
    assert person.script("document.getElementById('comparison-deletion').open")


def test_tables_sort_below_their_legend(person):
    person.open()
    column = "#results-toy-balanced-vit_t td:first-child"
    assert person.texts(column) == ["AR", "DAP", "constructor"]
    deletion = person.find("#results-toy-balanced-vit_t th:nth-child(2) button")
    assert deletion.text == "Del ↓"
    deletion.click()
    assert person.texts(column) == ["DAP", "AR", "constructor"]  # less is better: the best first
    deletion.click()
    assert person.texts(column) == ["constructor", "AR", "DAP"]
    legend, table = (person.find(f"#results {what}").location["y"] for what in (".legend", "table"))
    assert legend < table


def test_the_comparison_opens_by_metric(person, made):
    person.open()
    summary = person.find("#comparison-deletion summary")
    ours = made.compared.dropna(subset=["mean", "published"]).drop_duplicates(["method", "sampler", "metric"])
    agree = ours["verdict"].str.startswith("agrees").sum()
    assert summary.text.startswith(f"Del ↓ ViT-T balanced: {agree} of {len(ours)} agree")
    assert not person.find("#comparison-deletion table").is_displayed()
    summary.click()
    rows = person.driver.find_elements("css selector", "#comparison-deletion tbody tr")
    shown = [[cell.text for cell in row.find_elements("css selector", "td")][3:] for row in rows]
    assert shown == [
        [
            f"{line['published']:.3f}",
            f"{line['mean']:.3f}",
            f"{line['low']:.3f} to {line['high']:.3f}",
            f"{line['difference']:+.3f}",
            line["verdict"],
        ]
        for _, line in ours.iterrows()
    ]
    position = "[...document.querySelectorAll('#comparison-deletion svg %s')].map(node => +node.getAttribute('%s'))"
    dots = person.script(position % ("circle", "cx"))
    assert np.corrcoef(dots, ours["mean"])[0, 1] == pytest.approx(1)  # in the picture, too
    ends = np.array(person.script(position % ("line[stroke-width]", "x2")))
    starts = np.array(person.script(position % ("line[stroke-width]", "x1")))
    scale = np.diff(dots)[0] / np.diff(ours["mean"])[0]
    assert (ends - starts) / scale == pytest.approx((ours["high"] - ours["low"]).to_numpy(), rel=1e-3)
    diamonds = "document.querySelectorAll('#comparison-deletion svg path').length"
    assert person.script(diamonds) == len(ours)


def test_curves_have_insertion_and_methods_to_choose(person):
    person.open()
    assert person.texts("#curves figcaption") == ["Deletion: p(y)", "Insertion: p(y)"]
    points = "[...document.querySelectorAll('#curves polyline[data-method=dap]')].map(n => n.getAttribute('points'))"
    deletion, insertion = ([float(point.split(",")[1]) for point in line.split(" ")] for line in person.script(points))
    assert deletion[0] < deletion[1] < deletion[2]  # down on the page is less
    assert (insertion[0] - insertion[1]) / (insertion[0] - insertion[2]) == pytest.approx(0.25, abs=0.01)
    person.driver.find_element("xpath", "//section[@id='curves']//label[contains(., 'DAP')]/input").click()
    assert person.script(points) == []


def test_downloads(person, made):
    folder = made.place / "downloads"
    folder.mkdir()
    person.open()
    allowed = {"behavior": "allow", "downloadPath": str(folder)}
    person.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed)
    for title in ("All results as CSV", "Table 1 as LaTeX", "The comparison as CSV"):
        person.driver.find_element("link text", title).click()
    wanted = [folder / name for name in ("results.csv", "table1.tex", "comparison.csv")]
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(person.driver, 10).until(lambda _: all(file.is_file() for file in wanted))
    read = pd.read_csv(wanted[0])
    assert read["mean"].to_list() == pytest.approx(made.summary["mean"].to_list(), abs=1e-6)
    assert read["method"].to_list() == made.summary["method"].to_list()
    assert r"\begin{tabular}" in wanted[1].read_text()
    assert len(pd.read_csv(wanted[2])) == len(made.compared)


def test_what_is_missing_is_said(person):
    person.open(TOY)
    assert "the images are not in the cache" in person.find("#browser .note").text
    text = person.find("#missing").text
    assert "2 of 4 images have pictures" in text
    assert "There are no curves: the rows were made without them." in text
    person.find("#unmeasured summary").click()
    assert "model=vit_b method=dap sampler=balanced" in person.find("#unmeasured pre").text


def test_only_the_pages_own_script_runs(person):
    person.open()
    inject = "const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s)"
    person.driver.execute_script(inject)
    assert person.script("window.hit") is None
    assert person.script("document.querySelectorAll('b').length") == 0
    person.driver.get_log("browser")  # it says so


def test_on_a_phone(person):
    person.open(TOY, width=390, mobile=True)
    assert person.script("document.documentElement.scrollWidth") == 390  # nothing sticks out
    assert person.texts("#count") == ["1 of 3 images"]
    person.find("#browser button:last-of-type").click()
    assert person.texts("#count") == ["2 of 3 images"]


def test_many_metrics_fit_a_screen_and_keep_the_methods_on_a_phone(browser, tmp_path):
    metrics = sorted(set(labels()) & {file.stem for file in (CONF / "metric").glob("*.yaml")} - {"deletion"})
    assert len(metrics) > 18
    for method in ("generic_attention", "integrated_gradients", "dap"):
        cell(tmp_path, method, [0.12, 0.34, 0.23], more=metrics)
    person = Person(browser, page_of(tmp_path)).open()
    wide = "[...document.querySelectorAll('.scroll')].filter(node => node.scrollWidth > node.clientWidth).length"
    assert person.script(wide) == 0
    assert person.texts("#results tbody td:first-child")[:3] == ["DAP", "Generic attention", "IG"]
    person.open(width=390, mobile=True)
    assert person.script("document.documentElement.scrollWidth") == 390
    assert person.script(wide) > 2
    left = "[...document.querySelectorAll('#results tr')].slice(0, 4).map(row => %s.getBoundingClientRect().left)"
    first, second = (person.script(left % f"row.children[{at}]") for at in (0, 1))
    person.driver.execute_script("document.querySelector('#results .scroll').scrollLeft = 200")
    assert person.script(left % "row.children[0]") == pytest.approx(first)  # the methods stay
    assert person.script(left % "row.children[1]") == pytest.approx([at - 200 for at in second])  # the numbers move
