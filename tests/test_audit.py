"""python -m dap_bench.audit: toy methods that break one check each, and what the command says of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dap_bench import audit as command
from dap_bench import load_vit
from dap_bench.checks import HARD, QUESTIONS, Subject, Yardstick, audit, change, cost, shuffled
from dap_bench.config import choices
from dap_bench.data.shapes import draw
from dap_bench.data.sources import Shapes
from dap_bench.explainers.ar import ar
from dap_bench.isolation import Given

TOYS = '''
import torch
from dap_bench import Explanation
from dap_bench.explainers.gradcam import gradcam


def norms(vit, images, classes, layers=False, *, power=1.0):
    """In order, but blind to the class."""
    return vit.layout.patches_of(vit.trace(images).tokens[-1].norm(dim=-1)) ** power


def fine(vit, images, classes, layers=False):
    """Gradient times input, of the class."""
    trace = vit.trace(images, grad=["norm1"], start=-1)
    (gradient,) = trace.gradients(classes, "norm1", [-1])
    return vit.layout.patches_of((gradient * trace.norm1[-1]).sum(-1))


def of_batch(vit, images, classes, layers=False):
    """Scaled by the mean of the batch."""
    maps = norms(vit, images, classes)
    return maps - 0.5 * maps.mean(0, keepdim=True)


def unseeded(vit, images, classes, layers=False):
    return norms(vit, images, classes) + torch.rand(len(images), vit.patches)


def nothing(vit, images, classes, layers=False):
    return norms(vit, images, classes) / 0 * 0


def sometimes(vit, images, classes, layers=False):
    maps = norms(vit, images, classes)
    return torch.where((images.mean((1, 2, 3)) < -0.1)[:, None], torch.nan, maps)


def constant(vit, images, classes, layers=False):
    return torch.ones(len(images), vit.patches)


def edits(vit, images, classes, layers=False):
    maps = norms(vit, images, classes)
    with torch.no_grad():
        vit.model.head.weight.mul_(2)
    images.zero_()
    torch.set_default_dtype(torch.float64)
    return maps


def rounded(vit, images, classes, layers=False):
    """The fractional part of a large number: nothing but last digits."""
    return (norms(vit, images, classes).double() * 1e7) % 1


def crashes(vit, images, classes, layers=False):
    return 1 / 0
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("elsewhere")
    (place / "toys.py").write_text(TOYS)
    (place / "conf" / "method").mkdir(parents=True)
    yaml = "_target_: toys.norms\n_partial_: true\npower: 1.0\n"
    (place / "conf" / "method" / "my_norms.yaml").write_text(yaml)
    return place


@pytest.fixture(scope="module")
def toys(folder):
    sys.path.insert(0, str(folder))
    import toys

    yield toys
    sys.path.remove(str(folder))
    del sys.modules["toys"]


@pytest.fixture(scope="module")
def stage():
    """The bundled model, three images and what a forward pass costs."""
    vit = load_vit("vit_shapes", device="cpu")
    given, runner_up = command._given(vit, list(Shapes().fetch([0, 1, 2])))
    return vit, given, runner_up, Yardstick.of(vit, given)


@pytest.fixture(scope="module")
def checks(toys, stage):
    """The audit of a toy, by name."""
    vit, given, runner_up, yardstick = stage
    made = {}

    def of(name):
        if name not in made:
            found = audit(Subject(getattr(toys, name), vit, given, runner_up, yardstick))
            made[name] = {check.name: check for check in found}
        return made[name]

    return of


FAILING = {"of_batch": {"batch"}, "unseeded": {"twice"}, "nothing": {"finite"}, "constant": {"varies"}}


@pytest.mark.parametrize("name", ["norms", "fine", "edits", *FAILING])
def test_hard_checks_fail_where_they_should_and_nowhere_else(checks, name):
    found = checks(name)
    assert list(found) == list(QUESTIONS)
    assert {key for key, check in found.items() if check.verdict == "fail"} == FAILING.get(name, set())
    assert set(FAILING.get(name, ())) <= set(HARD)


def test_a_method_that_looks_at_class_and_weights(checks):
    found = checks("fine")
    assert {key: found[key].verdict for key in ("class", "head", "blocks", "fp64", "digit", "alone")} == dict.fromkeys(
        ("class", "head", "blocks", "fp64", "digit", "alone"), "pass"
    )
    assert float(found["class"].value) > 0.05


def test_a_method_that_is_blind_to_the_class(checks):
    found = checks("norms")
    assert (found["class"].value, found["class"].verdict) == ("0", "note")
    assert (found["head"].value, found["head"].verdict) == ("1.00", "note")
    assert found["blocks"].verdict == "pass"


def test_maps_that_are_no_numbers(checks, toys, stage):
    found = checks("nothing")
    assert found["finite"].value == "0/3"
    assert found["batch"].says == "not measured: no image has a finite map"
    vit, _, _, yardstick = stage
    given, runner_up = command._given(vit, list(Shapes().fetch(range(6))))
    dark = int((given.images.mean((1, 2, 3)) < -0.1).sum())
    assert 0 < dark < 6
    some = {check.name: check for check in audit(Subject(toys.sometimes, vit, given, runner_up, yardstick))}
    assert (some["finite"].value, some["finite"].verdict) == (f"{6 - dark}/6", "fail")
    assert (some["varies"].value, some["batch"].verdict) == (f"{6 - dark}/{6 - dark}", "pass")  # of the others


def test_side_effects_are_said(checks):
    found = checks("edits")["alone"]
    assert (found.value, found.verdict) == ("no", "note")
    assert found.says.startswith("it changes its images and torch's settings and the model; harmless here")
    assert torch.get_default_dtype() == torch.float32
    assert "the state of random numbers" in checks("unseeded")["alone"].says
    assert checks("norms")["alone"].value == "yes"


def test_last_digits(checks):
    found = checks("rounded")
    assert {found[key].verdict for key in ("fp64", "digit", "noise")} == {"note"}
    assert float(found["fp64"].value) < 0.5
    assert checks("constant")["fp64"].says == "not measured: a constant map has no order of patches"


def test_change_by_hand():
    a, b = torch.tensor([[0.0, 2.0, 4.0], [1.0, 1.0, 1.0]]), torch.tensor([[0.0, 3.0, 4.0], [1.0, 1.5, 1.0]])
    assert change(a, b).tolist() == [0.25, 0.5]


def test_memory_and_time_of_a_known_call(stage):
    _, given, _, yardstick = stage

    def allocate():
        one = torch.zeros(3 * 2**18)  # 3 MiB
        two = torch.zeros(3 * 2**20)  # 12 MiB
        del one
        return torch.zeros(3 * 2**16), two

    assert cost(allocate, given).bytes == 5 * 2**20  # 15 MiB for three images
    assert yardstick.rollout.bytes > yardstick.forward.bytes > 0
    assert yardstick.forward.seconds > 0


def test_shuffled_weights_are_the_same_numbers(stage):
    vit = stage[0]
    for part, other in (("head", "blocks"), ("blocks", "head")):
        twin = shuffled(vit, part)
        for name, weight in twin.model.named_parameters():
            before = vit.model.get_parameter(name)
            assert torch.equal(weight.flatten().sort().values, before.flatten().sort().values)
            assert name.startswith(part) or torch.equal(weight, before)
        changed = [name for name, weight in twin.model.named_parameters() if not _same(weight, vit, name)]
        assert changed
        assert not any(name.startswith(other) for name in changed)


def _same(weight, vit, name):
    return torch.equal(weight, vit.model.get_parameter(name))


def test_images_without_masks_and_with():
    vit = load_vit("vit_shapes", device="cpu")
    given, runner_up = command._given(vit, list(Shapes().fetch([5])))
    assert isinstance(given, Given)
    assert given.masks[0].shape == (224, 224)
    assert given.classes.item() != runner_up.item()
    assert torch.equal(given.classes, vit.score(given.images).argmax(1))
    assert ar(vit, given.images, given.classes).maps.shape == (1, 196)


# ---------------------------------------------------------------------- the command


def run(monkeypatch, capsys, folder, *arguments):
    """The command in this process, as if called in `folder`: its exit code and what it prints."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["audit", *arguments, "device=cpu"])
    try:
        command.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command_line_from_another_folder(folder):
    """Several methods: a line each, a page, exit code 1 because two fail."""
    names = "my_norms,toys.of_batch,toys.unseeded,toys.crashes"
    arguments = ["--config-dir", "conf", f"method={names}", "n=2", "device=cpu", "out=audit.md"]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "dap_bench.audit", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "checks/s" in done.stderr  # the progress bar
    assert all(len(line) <= 100 for line in done.stdout.splitlines() if "not measured" not in line)
    assert "Failed: toys.of_batch (batch); toys.unseeded (twice)." in done.stdout
    assert "toys.crashes was not measured: these images cannot be explained: ZeroDivisionError: division by zero" in (
        done.stdout
    )
    page = (folder / "audit.md").read_text()
    assert page.startswith("# Audit of 4 methods on vit_shapes\n\n`python -m dap_bench.audit --config-dir conf method=")
    assert "| my_norms | 2/2 | 2/2 | 0 | 0 | *0* | *1.00* | " in page


def test_one_method_gives_a_page_with_a_line_per_check(folder, toys, monkeypatch, capsys):
    (folder / "one.md").write_text("# Audit of fine on other\n\nkept\n")
    arguments = ["method=toys.norms", "method.power=2", "n=2", "out=one.md"]
    code, out, _ = run(monkeypatch, capsys, folder, *arguments)
    assert code == 0
    assert all(len(line) <= 100 for line in out.splitlines())
    assert [line.split()[0] for line in out.splitlines()[2:] if line[:1].isalpha()][: len(QUESTIONS)] == list(QUESTIONS)
    for _ in range(2):  # a page of the same title takes its place
        command._write(folder / "one.md", "Audit of toys.norms on vit_shapes", "new\n")
    assert (folder / "one.md").read_text() == (
        "# Audit of fine on other\n\nkept\n\n# Audit of toys.norms on vit_shapes\n\nnew\n"
    )


def test_photos_of_ones_own(folder, toys, monkeypatch, capsys):
    (folder / "photos").mkdir()
    for index in range(3):
        draw(index)[0].save(folder / "photos" / f"{index}.png")
    code, out, _ = run(monkeypatch, capsys, folder, "method=toys.constant", "image=photos", "n=2")
    assert (code, out.splitlines()[0]) == (1, "Audit of toys.constant on vit_shapes: 2 images")
    assert "Failed: toys.constant (varies)." in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a method to audit: method=NAME, one of agcam, ar,"),
        (["method=nope"], "there is no method=nope"),
        (["method=toys.crashes", "n=1"], "cannot be explained: ZeroDivisionError: division by zero (toys.py, line "),
        (["method=oracle", "image=photo.png"], "cannot be explained: no mask is known for this image"),
        (["method=ar", "n=0"], "n=0 must be an integer"),
        (["method=ar", "n=many"], "n=many must be an integer"),
        (["method=ar", "mehtod=x"], "mehtod=x is not an option; use method=, model=, data="),
        (["method=ar,dap", "method.relu=false"], "method.relu is an option of one method"),
        (["method=gradcam", "method.rleu=false"], "has no option 'rleu'"),
        (["method=ar", "image=nowhere.png"], "nowhere.png cannot be read"),
        (["method=ar", "model=no_such_vit"], "timm has no model"),
        (["method=ar", "data=parquet", "data.path=nowhere"], "data.path=nowhere holds no Parquet file"),
    ],
)
def test_mistakes_are_one_sentence(folder, toys, monkeypatch, capsys, arguments, words):
    draw(0)[0].save(folder / "photo.png")
    code, out, err = run(monkeypatch, capsys, folder, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("model", ["vit_t", "vit_shapes"])
def test_the_committed_page_has_every_shipped_method(model):
    text = (Path(__file__).parents[1] / "results" / "audit.md").read_text()
    shipped = set(choices("method")) - {"maps", "rise"}  # made elsewhere; hours of forward passes
    page = text.split(f"# Audit of {len(shipped)} methods on {model}\n")[1].split("\n# ")[0]
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in page.splitlines() if line.startswith("| ")}
    assert set(rows) - {"method", "---"} == shipped
    assert [name.strip() for name in rows["method"]] == list(QUESTIONS)
    assert "**" not in page.split("A value that fails")[0]  # no shipped method fails a hard check
