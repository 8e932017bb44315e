"""`regard look` on folders, animations and videos: stable colours, and runs that survive anything."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import regard
from regard.pictures import series
from regard.pictures.sources import natural, source_of
from regard.verbs import look as verb
from regard.vit import ViT

Command = Callable[..., "object"]


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


def frames(count: int, height: int = 32, width: int = 48) -> list[Image.Image]:
    return [with_square(height, width, 8, 4 * number % width, 8) for number in range(count)]


def resident() -> int:
    """Bytes of this process in memory, Pillow's pixels included, which Python's own count leaves out."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def outputs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.png"))


def notes(folder: Path) -> list[dict]:
    return [json.loads(Image.open(folder / name).info["regard"]) for name in outputs(folder)]


def test_names_sort_as_the_pictures_do_past_9999() -> None:
    assert sorted(["f10", "f9", "f1", "F2"], key=natural) == ["f1", "F2", "f9", "f10"]
    source = regard.pictures.sources.Source(Path("x.mp4"), "frames", 20_000, lambda: iter(()))
    items = [regard.pictures.sources.Item(number, f"frame {number}", Image.new) for number in (9, 999, 9999, 10_000)]
    names = [source.output(item, ".png") for item in items]
    assert names == sorted(names)
    assert names[-1] == "010000.png"


@pytest.mark.parametrize("kind", ["gif", "png", "webp", "tiff"])
def test_an_animation_is_drawn_frame_by_frame_on_one_scale(
    regard_command: Command, model: Path, tmp_path: Path, kind: str
) -> None:
    pictures = [*frames(3), frames(3)[0]]
    pictures[1].putpixel((47, 31), (9, 9, 9))
    path = tmp_path / f"film.{kind}"
    lossless = {"lossless": True} if kind == "webp" else {}
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=50, **lossless)
    ran = regard_command("look", path, "--model", model, "--head", "mean", "--out", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["made"] == 4
    assert outputs(tmp_path / "out") == [f"{number:06d}.png" for number in range(4)]
    assert len({json.dumps(note["scale"]) for note in notes(tmp_path / "out")}) == 1
    first, last = (Image.open(tmp_path / "out" / f"{number:06d}.png") for number in (0, 3))
    # The same but for the heading, which names the frame.
    assert np.array_equal(np.asarray(first)[40:], np.asarray(last)[40:]), "identical frames have identical colours"
    peaks = [note["peaks"]["query 0"] for note in notes(tmp_path / "out")]
    assert notes(tmp_path / "out")[0]["scale"]["query 0"] == max(peaks)
    assert "looking: 4 of 4 frames" in ran.err


def test_a_running_scale_never_falls_and_needs_one_pass(regard_command: Command, model: Path, tmp_path: Path) -> None:
    for number, picture in enumerate(frames(6)):
        picture.save(tmp_path / f"f{number}.png")
    out = tmp_path / "out"
    given = ["look", tmp_path, "--model", model, "--head", "mean", "--out", out, "--scale", "running"]
    ran = regard_command(*given)
    assert ran.code == 0, ran.err
    assert "looking" not in ran.err
    scales = [note["scale"]["query 0"] for note in notes(out)]
    peaks = [note["peaks"]["query 0"] for note in notes(out)]
    assert scales == [max(peaks[: i + 1]) for i in range(6)]
    (out / outputs(out)[3]).unlink()
    assert "1 drawn, 5 were there already" in regard_command(*given).out
    assert [note["scale"]["query 0"] for note in notes(out)] == scales


def test_a_folder_keeps_its_numbers_when_pictures_are_added_or_changed(
    regard_command: Command, model: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "in", tmp_path / "in" / "out"
    folder.mkdir()
    for name in ("b2.png", "b10.png"):
        frames(1)[0].save(folder / name)
    given = ["look", folder, "--model", model, "--head", "mean", "--out", out, "--scale", "shared"]
    assert regard_command(*given).code == 0
    assert outputs(out) == ["000000-b2.png", "000001-b10.png"]
    (folder / "deep").mkdir()
    frames(2)[1].save(folder / "a.png")
    frames(3)[2].save(folder / "deep" / "c.png")
    ran = regard_command(*given)
    assert "2 drawn, 2 were there already, 0 skipped" in ran.out
    assert outputs(out) == ["000000-b2.png", "000001-b10.png", "000002-a.png", "000003-c.png"]
    frames(4)[3].save(folder / "b10.png")
    later = (out / "000003-c.png").stat().st_mtime_ns + 10**9
    os.utime(folder / "b10.png", ns=(later, later))
    assert "1 drawn, 3 were there already" in regard_command(*given).out


def test_other_settings_are_told_instead_of_mixed(regard_command: Command, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    frames(1)[0].save(folder / "a.png")
    given = ["look", folder, "--model", model, "--out", tmp_path / "out"]
    assert regard_command(*given).code == 0
    before = (tmp_path / "out" / "000000-a.png").read_bytes()
    ran = regard_command(*given, "--layer", 0)
    assert ran.code == 2
    assert "layer was -1, and is 0; choose another --out" in ran.err
    torch.manual_seed(1)
    ViT.preset("tiny", dim=48, depth=2, heads=3, patch_size=8, image_size=(32, 48), registers=2).save_pretrained(model)
    assert "weights of" in regard_command(*given).err
    assert (tmp_path / "out" / "000000-a.png").read_bytes() == before


def test_a_folder_without_pictures_or_with_broken_ones_only_is_told(
    regard_command: Command, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "labels.txt").write_text("cat")
    assert "no pictures in this folder" in regard_command("look", folder, "--model", model).err
    (folder / "a.png").write_text("dear diary")
    ran = regard_command("look", folder, "--model", model, "--out", tmp_path / "out")
    assert ran.code == 2
    assert "none of the 1 pictures could be drawn; the first, a.png" in ran.err


def test_a_video_that_nothing_reads_and_a_wrong_out_are_one_line(
    regard_command: Command, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "film.mp4").write_bytes(b"\0" * 100)
    ran = regard_command("look", tmp_path / "film.mp4", "--model", model)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "ffmpeg -i film.mp4" in ran.err
    frames(3)[0].save(tmp_path / "film.gif", save_all=True, append_images=frames(3)[1:])
    ran = regard_command("look", tmp_path / "film.gif", "--model", model, "--out", tmp_path / "a.png")
    assert "--out must be a folder" in ran.err


def test_a_video_is_read_where_a_package_reads_it(
    regard_command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """imageio's interface: improps tells the count, imiter gives RGB arrays."""
    iio = pytest.importorskip("imageio.v3", reason="imageio is not installed")
    arrays = [np.asarray(picture) for picture in frames(4)]
    monkeypatch.setattr(iio, "improps", lambda path: type("Props", (), {"n_images": float("inf")})())
    monkeypatch.setattr(iio, "imiter", lambda path: iter(arrays))
    (tmp_path / "film.mp4").write_bytes(b"film")
    ran = regard_command("look", tmp_path / "film.mp4", "--model", model, "--head", "mean", "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert len(outputs(tmp_path / "out")) == 4


def test_a_truncated_animation_gives_the_frames_that_are_whole(
    regard_command: Command, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "film.webp"
    noise = [Image.effect_noise((48, 32), 60 + i).convert("RGB") for i in range(6)]
    noise[0].save(tmp_path / "film.tiff", save_all=True, append_images=noise[1:], compression="tiff_lzw")
    path = tmp_path / "film.tiff"
    whole = source_of(path)
    assert whole is not None
    damaged = bytearray(path.read_bytes())
    with Image.open(path) as image:
        image.seek(3)
        strip = image.tag_v2[273][0]
    damaged[strip : strip + 400] = b"\xff" * 400
    path.write_bytes(damaged)
    ran = regard_command("look", path, "--model", model, "--head", "mean", "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "5 drawn, 1 skipped" in ran.out
    assert "frame 3" in ran.out


@pytest.fixture(scope="session")
def five_hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "in"
    folder.mkdir()
    for number in range(500):
        with_square(24, 36, number % 16, number % 28, 8).save(folder / f"p{number}.jpg")
    (folder / "p250.jpg").write_bytes((folder / "p250.jpg").read_bytes()[:300])
    return folder


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.timeout(240)
def test_500_pictures_at_flat_memory_interrupted_and_gone_on_with(
    regard_command: Command, model: Path, five_hundred: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    given = [
        "look",
        five_hundred,
        "--model",
        model,
        "--head",
        "mean",
        "--scale",
        "running",
        "--out",
        out,
        "--panel",
        64,
    ]
    real, drawn = series.save, []

    def save_until_ctrl_c(*args: object) -> Path:
        if len(drawn) == 120:
            raise KeyboardInterrupt
        drawn.append(None)
        return real(*args)

    monkeypatch.setattr(series, "save", save_until_ctrl_c)
    ran = regard_command(*given)
    assert ran.code == 130
    assert "120 of 500 pictures are drawn; run it again to go on" in ran.err
    assert len(outputs(out)) == 120
    assert [path for path in out.iterdir() if path.suffix == ".part"] == []
    before = {name: (out / name).stat().st_mtime_ns for name in outputs(out)}
    held = []

    def save_and_weigh(*args: object) -> Path:
        held.append(resident())
        return real(*args)

    monkeypatch.setattr(series, "save", save_and_weigh)
    ran = regard_command(*given)
    assert ran.code == 0, ran.err
    assert "379 drawn, 120 were there already, 1 skipped" in ran.out
    assert "skipped p250.jpg: " in ran.out
    assert "drawing: 500 of 500 pictures" in ran.err
    assert all((out / name).stat().st_mtime_ns == when for name, when in before.items())
    assert len(outputs(out)) == 499
    # Of the last 300 pictures, whose sheets alone would be 9 MB, nothing stays.
    assert max(held[-20:]) - max(held[:80]) < 4e6


def test_a_killed_run_leaves_whole_files_and_goes_on(
    model: Path, five_hundred: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the first pass of a global scale, SIGKILL in the second; nothing is looked at twice."""
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for number in range(30):
        (folder / f"p{number}.jpg").write_bytes((five_hundred / f"p{number}.jpg").read_bytes())
    given = {"model": model, "head": "mean", "out": out, "panel": 64}
    real, count = verb.maps_of, itertools.count()

    def interrupted(*args: object) -> object:
        if next(count) == 12:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(verb, "maps_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        regard.look(folder, **given)
    assert (len(list((out / ".maps").iterdir())), outputs(out)) == (12, [])
    script = (
        "import os, signal, sys\nimport regard\nfrom regard.pictures import series\n"
        "real, left = series.save, [10]\n"
        "def killed(*args):\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(*args)\n"
        "series.save = killed\n"
        "folder, model, out = sys.argv[1:]\n"
        "regard.look(folder, model=model, head='mean', out=out, panel=64)\n"
    )
    command = [sys.executable, "-c", script, str(folder), str(model), str(out)]
    ran = subprocess.run(command, capture_output=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert len(outputs(out)) == 10
    for name in outputs(out):
        Image.open(out / name).load()
    monkeypatch.setattr(verb, "maps_of", lambda *args: pytest.fail("what was looked at is looked at again"))
    done = regard.look(folder, **given)
    assert (done.made, done.kept, done.skipped) == (20, 10, {})
    assert not (out / ".maps").exists()
    assert len({json.dumps(note["scale"]) for note in notes(out)}) == 1


def test_one_basis_colours_a_whole_row(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, picture in enumerate([*frames(3), frames(1)[0]]):
        picture.save(folder / f"{number}.png")
    regard.look(folder, model=model, head="mean", panels="pca", arrays="float32", out=tmp_path / "out")
    first, last = (np.load(tmp_path / "out" / f"00000{n}-{n}.npz")["colours"] for n in (0, 3))
    assert np.array_equal(first, last)
    assert (tmp_path / "out" / "pca.npz").is_file()
