"""Fixtures: the golden `nano` ViT, the bundled default, the assets with the real ViT-T and images, and a browser."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from dap_bench import ViT

torch.set_num_threads(1)  # the suite runs in two processes on two cores
os.environ["OMP_NUM_THREADS"] = "1"  # in what tests start too: on some CPUs last digits depend on it
DATA = Path(__file__).parent / "data"
ASSETS = Path(os.environ.get("DAP_BENCH_ASSETS", Path(__file__).parents[2] / "shared"))
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
TAG = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


class Golden:
    """Maps that the methods' original code gave, with the ViT and the images they were made on."""

    def __init__(self, arrays, vit, images):
        self.arrays, self.vit, self.images = arrays, vit, images

    def classes(self, which):
        return torch.from_numpy(self.arrays[f"class/{which}"]).long()

    def __call__(self, name, which):
        return torch.from_numpy(np.asarray(self.arrays[f"{name}/{which}"])).to(self.images)


def nano_model(arrays):
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, embed_dim=48, depth=4, num_heads=4, num_classes=10
    )
    model.load_state_dict({key[2:]: torch.from_numpy(arrays[key]) for key in arrays if key.startswith("w/")})
    return model.eval()


@pytest.fixture(scope="session")
def nano():
    arrays = dict(np.load(DATA / "nano.npz"))
    return Golden(arrays, ViT(nano_model(arrays).double()), torch.from_numpy(arrays["x"]).double())


@pytest.fixture(scope="session")
def nano32():
    arrays = dict(np.load(DATA / "nano.npz"))
    return Golden(arrays, ViT(nano_model(arrays)), torch.from_numpy(arrays["x"]).float())


@pytest.fixture(scope="session")
def assets():
    if not (ASSETS / "weights").is_dir():
        pytest.skip(f"no weights and images under {ASSETS}; set DAP_BENCH_ASSETS")
    return ASSETS


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A real one, with a profile of its own."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no chromium and chromedriver here; `make tools` installs them")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in [*CHROMIUM, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()
