"""`regard look` on one picture: maps lie where they belong, and colours tell what they mean."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import regard
from regard import InputError
from regard.pictures.arrays import load_arrays
from regard.pictures.colours import blended, composite, head_colours, overlay, table
from regard.pictures.maps import METHODS
from regard.vit import Preprocess, ViT, attention_rows
from regard.vit.maps.grid import Frame

Command = Callable[..., "object"]


def sees_light(**settings) -> ViT:
    """A ViT of one layer in which every token looks at bright patches, and its position is worth nothing."""
    vit = ViT.preset("tiny", dim=16, depth=1, heads=2, positions="none", **settings)
    with torch.no_grad():
        for weight in vit.parameters():
            weight.zero_()
        block, patch = vit.blocks[0], vit.config.patch_size
        vit.tokenizer.proj.weight[0] = 1 / (3 * patch**2)  # the first number of a token is its brightness
        vit.tokenizer.proj.bias[1] = 3.0  # and the second keeps the norm from hiding it
        block.norm1.weight.fill_(1.0)
        block.attn.to_q.bias.fill_(1.0)
        block.attn.to_k.weight[:, 0] = 3.0
    return vit


def with_square(height: int, width: int, top: int, left: int, side: int) -> Image.Image:
    picture = Image.new("RGB", (width, height), (124, 116, 104))  # the mean colour, as padding has it
    ImageDraw.Draw(picture).rectangle((left, top, left + side - 1, top + side - 1), fill="white")
    return picture


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A ViT with 2 layers, 3 heads, registers, random weights and a table that is large enough to matter."""
    torch.manual_seed(0)
    vit = ViT.preset("tiny", dim=48, depth=2, heads=3, patch_size=8, image_size=(32, 48), registers=2)
    vit.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


# Height and width of the picture, patch, registers.
PLACES = {
    "12x16 patches and 4 registers": (96, 128, 8, 4),
    "8x32 patches without registers": (64, 256, 8, 0),
    "427x488 px, patch 8": (427, 488, 8, 2),
    "500x333 px, patch 14": (500, 333, 14, 2),
}


@pytest.mark.parametrize("policy", ["resize", "crop", "pad"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [None, "own", "given", "passport that crops"])
def test_a_bright_square_stays_where_it_is_in_the_picture(
    tmp_path: Path, place: str, policy: str, size: str | None
) -> None:
    height, width, patch, registers = PLACES[place]
    recipe = Preprocess(None) if size is None else Preprocess((11 * patch, 9 * patch))
    if size == "passport that crops":
        recipe = Preprocess((9 * patch + 3, 9 * patch + 5), "crop", 0.875)
    shape = dict(patch_size=patch, image_size=(11 * patch, 9 * patch), registers=registers, preprocess=recipe)
    sees_light(**shape).save_pretrained(tmp_path / "vit")
    asked = {"own": "own", "given": (height // 2 + 3, width // 2 + 1)}.get(size or "")
    # Around the middle, for a passport that crops sees no more.
    for down, across in itertools.product((-0.35, -0.1, 0.05), repeat=2):
        top, left = (round(side / 2 + at * min(height, width)) for side, at in ((height, down), (width, across)))
        picture = with_square(height, width, top, left, 2 * patch)
        picture.save(tmp_path / "photo.png")
        found = regard.look(
            tmp_path / "photo.png", model=tmp_path / "vit", size=asked, size_policy=policy, head="mean",
            out=tmp_path / "a.npz",
        )  # fmt: skip
        frame, heat = found.maps.frame, found.maps.maps[0, 0, 0]
        assert tuple(heat.shape) == frame.grid
        # The light's centre, in the pixels of the picture; other patches share what is left evenly.
        share = (heat - heat.median()).clamp_min(0)
        share /= share.sum()
        placed = torch.tensor([[frame.patch_box(r, c) for c in range(heat.shape[1])] for r in range(heat.shape[0])])
        y = float((share * (placed[..., 0] + placed[..., 2]) / 2).sum())
        x = float((share * (placed[..., 1] + placed[..., 3]) / 2).sum())
        tall, wide = (float(v) for v in (placed[0, 0, 2] - placed[0, 0, 0], placed[0, 0, 3] - placed[0, 0, 1]))
        assert abs(y - (top + patch)) <= tall / 2 + 1, (y, top + patch)
        assert abs(x - (left + patch)) <= wide / 2 + 1, (x, left + patch)
        # And drawn: the brightest of the colours lies on the square, give or take one patch.
        drawn = np.asarray(overlay(picture, heat, frame, float(heat.max()))).astype(int)
        row, column = np.unravel_index(drawn.sum(axis=-1).argmax(), drawn.shape[:2])
        assert top - tall <= row < top + 2 * patch + tall
        assert left - wide <= column < left + 2 * patch + wide


def test_sizes_that_the_policy_refuses_are_one_line(regard_command: Command, model: Path, tmp_path: Path) -> None:
    with_square(30, 50, 4, 4, 8).save(tmp_path / "a.png")
    ran = regard_command("look", tmp_path / "a.png", "--model", model, "--size", "own", "--size_policy", "error")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "do not divide an image of 30 x 50 px" in ran.err


@pytest.mark.parametrize("fit", ["squash", "crop"])
@pytest.mark.parametrize("size", [(32, 48), (40, 40), (21, 33)])
@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.2])
def test_the_window_is_what_the_tensor_shows(fit: str, size: tuple[int, int], ratio: float) -> None:
    """A picture of a slope: its values in the tensor tell from which rows and columns they come."""
    height, width = 120, 200
    down = np.linspace(0, 255, height)[:, None] + np.zeros((1, width))
    across = np.linspace(0, 255, width)[None] + np.zeros((height, 1))
    picture = Image.fromarray(np.stack([down, across, across], axis=-1).round().astype(np.uint8))
    recipe = Preprocess(size, fit, ratio, "bilinear")
    pixels = recipe.pixels(picture).double()
    top, left, bottom, right = recipe.window(height, width)
    y = top + (torch.arange(size[0]) + 0.5) * (bottom - top) / size[0]
    x = left + (torch.arange(size[1]) + 0.5) * (right - left) / size[1]
    inside_y, inside_x = (y > 8) & (y < height - 8), (x > 8) & (x < width - 8)
    middle_y, middle_x = size[0] // 2, size[1] // 2
    rows = pixels[0, inside_y, middle_x] / 255 * (height - 1) + 0.5
    columns = pixels[1, middle_y, inside_x] / 255 * (width - 1) + 0.5
    assert (rows - y[inside_y]).abs().max() < 1.5
    assert (columns - x[inside_x]).abs().max() < 1.5


def test_a_pixel_of_the_picture_asks_the_patch_that_holds_it(tmp_path: Path, model: Path) -> None:
    with_square(100, 90, 40, 20, 30).save(tmp_path / "a.png")
    look = {"model": model, "out": tmp_path / "a.npz"}
    for y, x in ((0, 0), (99, 89), (50, 30)):
        by_pixel = regard.look(tmp_path / "a.png", query=f"pixel:{y},{x}", **look)
        row, column = y * 4 // 100, x * 6 // 90
        by_patch = regard.look(tmp_path / "a.png", query=f"{row},{column}", **look)
        assert torch.equal(by_pixel.maps.maps, by_patch.maps.maps)
        assert by_pixel.maps.queries == (f"pixel ({y}, {x})",)
    with pytest.raises(InputError, match=r"lies outside of the picture of 100 x 90 px"):
        regard.look(tmp_path / "a.png", query="pixel:100,0", **look)


def test_a_pixel_that_was_cut_away_is_told() -> None:
    frame = Frame((100, 200), (32, 32), (4, 4), (0.0, 50.0, 100.0, 150.0))
    assert frame.patch_at(99, 149) == (3, 3)
    with pytest.raises(InputError, match="cut away"):
        frame.patch_at(50, 49)


@pytest.mark.parametrize("head", ["all", "mean", "max", "auto", 1])
def test_maps_are_those_of_attention_rows(tmp_path: Path, model: Path, head: str | int) -> None:
    picture = with_square(32, 48, 8, 8, 16)
    picture.save(tmp_path / "a.png")
    vit = ViT.from_pretrained(model)
    rows = attention_rows(vit, picture, "registers", "all")
    found = regard.look(
        tmp_path / "a.png", model=model, query="registers", layer="all", head=head, out=tmp_path / "a.png-look.png"
    )
    heads = rows.patches[0].movedim(1, 2)
    auto = [[[int(n) for n in name[0][12:].split(", ")] for name in line] for line in found.maps.names] if (
        head == "auto") else None  # fmt: skip
    want = {
        "all": lambda: heads,
        "mean": lambda: heads.mean(dim=2, keepdim=True),
        "max": lambda: heads.amax(dim=2, keepdim=True),
        "auto": lambda: torch.stack([torch.stack([heads[i, j, auto[i][j]].mean(0, keepdim=True) for j in range(2)])
                                     for i in range(2)]),
        1: lambda: heads[:, :, 1:2],
    }[head]()  # fmt: skip
    torch.testing.assert_close(found.maps.maps, want, atol=1e-7, rtol=1e-5)
    if head != "max":
        total = found.maps.maps.sum(dim=(-2, -1)) + found.maps.cls + found.maps.registers.sum(dim=-1)
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_draws_and_tells(
    regard_command: Command, model: Path, photo: Path, tmp_path: Path, method: str
) -> None:
    given = ["--model", model, "--method", method, "--out", tmp_path / "a.png"]
    ran = regard_command("look", photo, *given, "--panels", "maps,norms,pca", "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["method"] == method
    assert np.isfinite(np.array(told["heads"][0]["map"])).all()
    assert np.ptp(np.array(told["heads"][0]["map"])) > 0
    assert (told["layer"] is None) == (method in ("rollout", "relevance", "legrad"))
    assert regard_command("look", photo, *given).code == 0


def test_wrong_questions_are_one_line(regard_command: Command, model: Path, photo: Path) -> None:
    for flags, says in {
        ("--query", "reg7"): "no reg7",
        ("--query", "9,9"): "outside of the grid of 4 x 6",
        ("--query", "pixel:x"): "pixel:Y,X",
        ("--head", "9"): "head 9 does not exist",
        ("--head", "best"): "best",
        ("--layer", "7"): "layer 7 does not exist",
        ("--method", "magic"): "choose one of rows",
        ("--panels", "maps,cake"): "'cake'",
        ("--size", "12"): "give H,W in pixels, or own",
        ("--method", "rollout", "--head", "1"): "leave --head out",
        ("--panels", "composite", "--head", "mean"): "--head all",
    }.items():
        ran = regard_command("look", photo, "--model", model, *flags)
        assert ran.code == 2, (flags, ran)
        assert ran.err.count("\n") == 1, ran.err
        assert says in ran.err, (flags, ran.err)
    assert list(Path().glob("photo-look*")) == []


def test_two_numbers_after_size_are_one_size(regard_command: Command, model: Path, photo: Path, tmp_path: Path) -> None:
    for size in (["--size", "40,64"], ["--size", "40", "64"], ["--size=40x64"]):
        ran = regard_command("look", photo, "--model", model, *size, "--out", tmp_path / "a.npz", "--json")
        assert ran.code == 0, ran.err
        assert np.array(json.loads(ran.out)["heads"][0]["map"]).shape == (5, 8)


def test_arrays_are_read_back_and_by_numpy_alone(model: Path, photo: Path, tmp_path: Path) -> None:
    found = regard.look(photo, model=model, layer="all", panels="maps,norms", arrays="float16", out=tmp_path / "a.png")
    assert found.arrays == tmp_path / "a.npz"
    with np.load(found.arrays, allow_pickle=False) as file:
        assert file["maps"].dtype == np.float16
        assert file["maps"].shape == (2, 1, 3, 4, 6)
        assert file["names"][1, 0].tolist() == ["head 0", "head 1", "head 2"]
        assert (file["layers"].tolist(), file["queries"].tolist()) == ([0, 1], ["cls"])
        assert (file["grid"].tolist(), file["picture"].tolist()) == ([4, 6], [40, 60])
        assert str(file["model"]) == str(model)
        total = file["maps"].astype(float).sum(axis=(-2, -1)) + file["cls"] + file["registers"].sum(axis=-1)
        np.testing.assert_allclose(total, 1, atol=2e-3)
    back = load_arrays(found.arrays)
    torch.testing.assert_close(back.maps, found.maps.maps, atol=1e-3, rtol=1e-3)
    assert back.frame == found.maps.frame
    assert back.names == found.maps.names


def test_colours_are_rgb_and_the_bar_tells_them() -> None:
    """The hottest patch of magma is yellowish: red above green above blue, not the other way round."""
    picture = Image.new("RGB", (60, 40), (128, 128, 128))
    heat = torch.tensor([[0.0, 0.5], [0.25, 1.0]])
    drawn = np.asarray(overlay(picture, heat, Frame((40, 60), (2, 2), (2, 2), (0, 0, 40, 60)), 1.0)).astype(int)
    red, green, blue = drawn[0, 59]
    assert red > blue > green > 0, "half way magma is purple"
    assert drawn[39, 59][2] < drawn[39, 59][:2].min(), "at its end it is yellowish"
    bar = blended(np.full((1, 256), 128, np.uint8), np.linspace(0, 1, 256)[None]).astype(int)
    for value, at in ((0.0, (0, 0)), (0.5, (0, 59)), (0.25, (39, 0)), (1.0, (39, 59))):
        assert np.abs(bar[0, round(value * 255)] - drawn[at]).max() <= 2
    light = table("magma").astype(float) @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light) >= -0.5).all(), "a perceptual colour map never gets darker"


def test_a_scale_is_shared_or_each_map_s_own(model: Path, photo: Path, tmp_path: Path) -> None:
    shared = regard.look(photo, model=model, out=tmp_path / "shared.png")
    regard.look(photo, model=model, scale="each", out=tmp_path / "each.png")
    assert Image.open(tmp_path / "shared.png").tobytes() != Image.open(tmp_path / "each.png").tobytes()
    regard.look(photo, model=model, out=tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "shared.png").read_bytes()
    assert shared.picture == tmp_path / "shared.png"


def test_the_composite_gives_each_head_its_own_colour() -> None:
    maps = torch.zeros(3, 2, 3)
    maps[0, 0, 0], maps[1, 0, 2], maps[2, 1, 1] = 1.0, 0.2, 5.0
    maps[2, 1, 2] = 0.5  # a tenth of its peak
    colour, alpha = composite(maps)
    own = torch.tensor(head_colours(3)).double() / 255
    for head, (row, column) in enumerate(((0, 0), (0, 2), (1, 1))):
        torch.testing.assert_close(colour[row, column], own[head])
        assert alpha[row, column] == pytest.approx(0.85)
    assert alpha[1, 2] == 0
    assert len(set(head_colours(24))) == 24


def test_two_models_stand_on_one_sheet(regard_command: Command, model: Path, photo: Path, tmp_path: Path) -> None:
    ViT.preset("tiny", dim=48, depth=2, heads=2, patch_size=8, image_size=(24, 24)).save_pretrained(tmp_path / "other")
    given = ["look", photo, "--model", model, "--out", tmp_path / "a.png"]
    assert regard_command(*given).code == 0
    one = Image.open(tmp_path / "a.png").height
    ran = regard_command(*given, "--against", tmp_path / "other", "--json", "--arrays", "float32")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert (len(told["heads"]), len(told["against"])) == (3, 2)
    assert Image.open(tmp_path / "a.png").height > 1.6 * one
    assert (tmp_path / "a-against.npz").is_file()


def test_a_page_is_written_where_its_name_says_so(
    regard_command: Command, model: Path, photo: Path, tmp_path: Path
) -> None:
    ran = regard_command("look", photo, "--model", model, "--out", tmp_path / "a.html", "--layer", "all", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["picture"] == str(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    ran = regard_command("look", photo, "--model", model, "--out", tmp_path / "b.html", "--method", "rollout")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
