"""python -m dap_bench.explain: one photo, one PNG."""

import pytest
from PIL import Image

from dap_bench.data.shapes import CLASSES, draw
from dap_bench.explain import main


def test_it_writes_a_picture_and_names_both_classes(tmp_path, capsys):
    draw(15)[0].save(tmp_path / "star.png")
    out = tmp_path / "new" / "out.png"
    main([f"image={tmp_path / 'star.png'}", "model=vit_shapes", "method=dap,legrad", f"out={out}", "device=cpu"])
    first, second, wrote = capsys.readouterr().out.splitlines()
    assert first.startswith(CLASSES[15 % 12])
    assert second.rsplit(" (", 1)[0] in CLASSES
    assert wrote == f"wrote {out}"
    width, height = Image.open(out).size
    # three columns of 1.15 inches and two rows of 1.2, 0.3 and 0.25 for the texts, at 140 dots per inch
    assert (width, height) == (525, 371)


def test_without_a_photo_it_draws_one(tmp_path):
    main(["model=vit_shapes", "method=ar", f"out={tmp_path / 'o.png'}", "device=cpu"])
    assert Image.open(tmp_path / "o.png").size == (364, 371)


def test_without_the_hub_it_goes_on_with_the_embedded_model_and_says_so(tmp_path, capsys, monkeypatch):
    from huggingface_hub import HfApi

    def fail(*_, **__):
        raise ConnectionError

    monkeypatch.setattr(HfApi, "auth_check", fail)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    main(["model=vit_b", "method=ar", f"out={tmp_path / 'o.png'}", "device=cpu"])
    assert "Using the bundled vit_shapes instead" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["image=/does/not/exist.jpg"], "cannot be read"),
        (["out=/dev/null/x.png"], "/dev/null cannot be written"),
        (["out=x.docx"], "x.docx is no picture that can be written: its name should end in .png or .pdf"),
        (["imag=x.jpg"], "imag=x.jpg is not an option; use image=, model=, method=, out=, device= or --help."),
        (["method=nope"], "there is no method=nope"),
        (["model=no_such_vit"], "timm has no model"),
    ],
)
def test_bad_input(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["model=vit_shapes", "method=ar", "device=cpu", *arguments])
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_image(tmp_path, capsys):
    (tmp_path / "x.jpg").write_text("text")
    with pytest.raises(SystemExit, match="2"):
        main([f"image={tmp_path / 'x.jpg'}", "model=vit_shapes", "method=ar", "device=cpu"])
    assert "cannot be decoded" in capsys.readouterr().err


def test_class_names_of_imagenet():
    import timm

    from dap_bench import ViT

    vit = ViT(timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=1, embed_dim=48, num_heads=3))
    assert (vit.class_name(0), vit.class_name(340)) == ("tench", "zebra")
    assert (
        ViT(timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=48, num_heads=3, num_classes=7)).class_name(3)
        == "class 3"
    )
