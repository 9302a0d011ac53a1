"""python -m dap_bench.app: what the page shows is what `explain` makes."""

import os
import socket
import subprocess
import sys
import time
from io import BytesIO
from urllib.request import ProxyHandler, build_opener

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from dap_bench import UserError, load_method, load_vit
from dap_bench.app import build, tile
from dap_bench.data.shapes import CLASSES, draw
from dap_bench.explain import colours, heatmaps
from dap_bench.report.pictures import COLOURS, OPACITY

DIRECTLY = build_opener(ProxyHandler({}))


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the app is, started as a user starts it."""
    pytest.importorskip("gradio", reason="no gradio here; `make app` installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dap_bench.app", "device=cpu", f"port={port}"]
    environment = {**os.environ, "GRADIO_TEMP_DIR": str(tmp_path_factory.mktemp("gradio"))}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == f"open http://127.0.0.1:{port}/ in a browser; press Ctrl-C to stop\n"
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()


def waited(found, seconds=60):
    """What a function gives as soon as that is something."""
    end = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < end:
        time.sleep(0.2)
    return value


def expected(model, picture, label, methods):
    """The tiles that the page should show."""
    vit = load_vit(model, device="cpu")
    images = vit.transform(picture)[None]
    label = vit.score(images).argmax().item() if label is None else label
    (maps,) = heatmaps(vit, {name: load_method(name) for name in methods}, images, [label])
    return [tile(colours(vit, images), heatmap) for heatmap in (None, *maps)]


def test_two_methods_and_a_class_and_another_model_in_a_browser(address, browser, tmp_path):
    from selenium.webdriver.common.keys import Keys

    def all_of(selector):
        return browser.find_elements("css selector", selector)

    def shown():
        return browser.execute_script("return [...document.querySelectorAll('#maps img')].map(each => each.src)")

    def choose(field, text):
        field.click()
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text, Keys.ENTER)

    def explain():
        """The pictures that are there after a click, as the browser got them."""
        before = shown()
        browser.find_element("xpath", "//button[normalize-space()='Explain']").click()
        assert waited(lambda: shown() not in ([], before))
        return [_picture(each) for each in shown()]

    picture = draw(15)[0]
    picture.save(tmp_path / "star.png")
    browser.set_window_size(1280, 1000)
    browser.get(address)
    (upload,) = waited(lambda: all_of("input[type=file]"))
    upload.send_keys(str(tmp_path / "star.png"))
    for box in all_of("label:has(input[type=checkbox])"):
        wanted = box.text in ("LeGrad", "DAP")
        if box.find_element("css selector", "input").is_selected() != wanted:
            box.click()
    model, label = all_of("input[role=combobox]")
    assert (model.get_attribute("value"), label.get_attribute("value")) == ("vit_shapes", "the likeliest")
    choose(label, CLASSES[7])
    np.testing.assert_array_equal(explain(), expected("vit_shapes", picture, 7, ["legrad", "dap"]))
    assert [caption.text for caption in all_of("#maps .caption-label")] == ["photo", "LeGrad", "DAP"]
    assert browser.find_element("css selector", "h3").text == f"Maps of {CLASSES[7]}"
    assert CLASSES[15 % 12] in all_of("[data-testid=label-output-value]")[0].text
    assert browser.execute_script("return document.querySelector('#maps img').naturalWidth") == 224

    choose(model, "vit_shapes_avg")
    assert waited(lambda: all_of("input[role=combobox]")[1].get_attribute("value") == "the likeliest")
    np.testing.assert_array_equal(explain(), expected("vit_shapes_avg", picture, None, ["legrad", "dap"]))

    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert loaded
    assert all(name.startswith((address, "data:")) for name in loaded)  # nothing from elsewhere: no fonts, no analytics
    assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def _picture(address):
    with DIRECTLY.open(address) as file:
        return np.asarray(Image.open(BytesIO(file.read())).convert("RGB"))


def test_a_mistake_is_a_sentence_on_the_page(address, browser, tmp_path):
    (tmp_path / "drawing.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>')
    browser.get(address)
    (upload,) = waited(lambda: browser.find_elements("css selector", "input[type=file]"))
    upload.send_keys(str(tmp_path / "drawing.svg"))
    assert waited(lambda: browser.find_elements("css selector", "[data-testid=image] img"))
    browser.find_element("xpath", "//button[normalize-space()='Explain']").click()
    sentence = "return document.querySelector('.toast-message-text')?.innerText"
    said = waited(lambda: browser.execute_script(sentence))
    assert said.startswith("image=drawing.svg: the image cannot be decoded")
    assert browser.find_elements("css selector", "#maps img") == []


def test_a_tile_is_the_photo_under_its_heatmap_pixel_by_pixel():
    random = np.random.default_rng(0)
    photo, heatmap = random.random((20, 30, 3)), random.random((20, 30))
    grey, colour = photo.mean(2, keepdims=True), matplotlib.colormaps[COLOURS](heatmap)[..., :3]
    expected = 255 * ((1 - OPACITY) * grey + OPACITY * colour)
    assert tile(photo, heatmap).shape == (20, 30, 3)
    assert np.abs(tile(photo, heatmap) - expected).max() < 3  # rounded twice
    assert np.abs(tile(photo) - 255 * photo).max() <= 1


def test_heatmaps_are_those_of_the_explanations():
    vit = load_vit("vit_shapes", device="cpu")
    images = vit.transform(draw(3)[0])[None]
    method = load_method("legrad")
    ((first,), (second,)) = heatmaps(vit, {"legrad": method}, images, [3, 5])
    for found, label in ((first, 3), (second, 5)):
        expected = method(vit, images, torch.tensor([label])).heatmaps(vit.image_size)[0].float()
        np.testing.assert_array_equal(found, expected.numpy())
    assert not np.array_equal(first, second)


def run(*arguments, **environment):
    command = [sys.executable, "-m", "dap_bench.app", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def test_without_gradio_it_says_how_to_get_it(tmp_path):
    (tmp_path / "gradio.py").write_text("raise ImportError('none here')")
    done = run(PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("app: the app needs gradio; install it: pip install 'dap-bench[app]', ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("port=high", "port=high must be an integer"),
        ("share=perhaps", "share must be one of true, false"),
        ("modl=vit_t", "modl=vit_t is not an option"),
    ],
)
def test_a_wrong_option_is_a_sentence(argument, words):
    done = run(argument)
    assert (done.returncode, words in done.stderr) == (2, True)
    assert done.stderr.count("\n") == 1


def test_a_port_that_another_program_has():
    pytest.importorskip("gradio", reason="no gradio here; `make app` installs it")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("device=cpu", f"port={port}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"port={port} cannot be used" in done.stderr


def test_a_model_that_is_not_there():
    pytest.importorskip("gradio", reason="no gradio here; `make app` installs it")
    with pytest.raises(UserError, match="timm has no model"):
        build("no_such_vit", device="cpu")
