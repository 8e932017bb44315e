"""Every planted fault is found and named, and nothing else is."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.datasets.check import Copies, Findings, examine
from regard.datasets.near import SIDE, fingerprints, near_groups
from regard.datasets.pictures import PictureSet, load_pictures
from regard.vit.errors import InputError


def scene(seed: int, height: int = 96, width: int = 128) -> Image.Image:
    """Soft random blobs: as smooth as a photograph, and never twice the same."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def save(image: Image.Image, path: Path, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """Twelve pictures of two classes to train on, six to test on: all sound, all different."""
    for number in range(18):
        split = "train" if number < 12 else "test"
        save(scene(number), tmp_path / split / ("cat", "dog")[number % 2] / f"{number}.jpg", quality=92)
    return tmp_path


def found(root: Path, **options: object) -> Findings:
    sets = {split: load_pictures(root, split) for split in ("train", "test")}
    return examine(sets, **options)  # type: ignore[arg-type]


def told(groups: list[Copies] | None) -> list[tuple[tuple[str, ...], bool, bool]]:
    assert groups is not None
    return [(tuple(p.id for p in group.pictures), group.across, group.conflicting) for group in groups]


def test_a_clean_set_reports_nothing(clean: Path) -> None:
    findings = found(clean)
    assert (findings.exact, findings.near) == ([], [])
    for name, split in findings.splits.items():
        assert split.pictures == split.looked_at == {"train": 12, "test": 6}[name]
        assert split.counts == dict.fromkeys(("cat", "dog"), split.pictures // 2)
        assert split.imbalance == 1
        assert (split.height, split.width) == ((96, 96, 96), (128, 128, 128))
        assert (split.formats, split.modes) == ({"JPEG": split.pictures}, {"colour": split.pictures})
        assert [split.broken, split.wrong_suffix, split.small, split.single, split.missing] == [[]] * 5
        assert (split.rotated, split.transparent, split.unlabelled) == (0, 0, 0)


def test_a_broken_picture_and_a_text_named_jpg_are_named_with_their_reason(clean: Path) -> None:
    whole = (clean / "train" / "cat" / "0.jpg").read_bytes()
    (clean / "train" / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (clean / "test" / "dog" / "notes.jpg").write_text("remember to label these")
    (clean / "test" / "dog" / "empty.jpg").touch()
    splits = found(clean).splits
    [(cut, why)] = splits["train"].broken
    assert cut == "train/cat/cut.jpg"
    assert "truncated or damaged" in why
    assert dict(splits["test"].broken).keys() == {"test/dog/notes.jpg", "test/dog/empty.jpg"}
    assert "not an image" in dict(splits["test"].broken)["test/dog/notes.jpg"]
    assert "empty (0 bytes)" in dict(splits["test"].broken)["test/dog/empty.jpg"]
    assert (splits["train"].pictures, splits["train"].formats) == (13, {"JPEG": 12})


def test_links_to_nowhere_and_pipes_named_as_pictures_are_broken(clean: Path) -> None:
    (clean / "train" / "cat" / "gone.jpg").symlink_to(clean / "nowhere.jpg")
    (clean / "train" / "dog" / "round.jpg").symlink_to("round.jpg")
    os.mkfifo(clean / "test" / "dog" / "pipe.jpg")
    splits = found(clean).splits
    broken = dict(splits["train"].broken)
    assert broken["train/cat/gone.jpg"] == "a link to a file that is not there; mend or remove it"
    assert broken.keys() == {"train/cat/gone.jpg", "train/dog/round.jpg"}
    assert [name for name, _ in splits["test"].broken] == ["test/dog/pipe.jpg"]
    assert (splits["train"].pictures, splits["train"].formats) == (14, {"JPEG": 12})


def test_a_copy_across_splits_is_found_whatever_its_name_and_format(clean: Path) -> None:
    source = clean / "train" / "dog" / "5.jpg"
    (clean / "test" / "dog" / "same.jpg").write_bytes(source.read_bytes())
    save(Image.open(source), clean / "train" / "dog" / "again.png")
    assert told(found(clean).exact) == [
        (("train/dog/5.jpg", "train/dog/again.png", "test/dog/same.jpg"), True, False),
    ]
    assert found(clean).near == []


def test_a_picture_resized_and_saved_again_is_a_near_copy(clean: Path) -> None:
    small = Image.open(clean / "train" / "cat" / "4.jpg").resize((80, 60), Image.Resampling.LANCZOS)
    save(small, clean / "test" / "cat" / "smaller.jpg", quality=70)
    findings = found(clean)
    assert findings.exact == []
    assert told(findings.near) == [(("train/cat/4.jpg", "test/cat/smaller.jpg"), True, False)]
    assert found(clean, near=False).near is None


def test_copies_with_different_labels_are_found(clean: Path) -> None:
    data = (clean / "train" / "cat" / "2.jpg").read_bytes()
    (clean / "train" / "dog" / "2.jpg").write_bytes(data)
    assert told(found(clean).exact) == [(("train/cat/2.jpg", "train/dog/2.jpg"), False, True)]


def test_what_is_unusual_is_named_and_counted(clean: Path) -> None:
    train = clean / "train" / "cat"
    save(Image.new("RGB", (1, 1), "red"), train / "dot.png")
    save(scene(30, 20, 200), train / "strip.png")
    save(scene(31).convert("L"), train / "grey.png")
    save(scene(32).convert("CMYK"), train / "ink.jpg", quality=92)
    save(scene(33), train / "really.jpg", format="PNG")
    glass = scene(34).convert("RGBA")
    glass.putalpha(90)
    save(glass, train / "glass.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    save(scene(35, 50, 70), train / "lying.jpg", exif=exif)
    split = found(clean).splits["train"]
    assert split.single == ["train/cat/dot.png"]
    assert split.small == ["train/cat/dot.png", "train/cat/strip.png"]
    assert split.wrong_suffix == [("train/cat/really.jpg", "PNG")]
    assert split.widest == ("train/cat/strip.png", 10.0)
    assert split.tallest == ("train/cat/lying.jpg", 50 / 70)  # as it stands upright
    assert split.modes == {"colour": 17, "grey": 1, "CMYK": 1}
    assert split.formats == {"JPEG": 14, "PNG": 5}
    assert (split.transparent, split.rotated) == (1, 1)
    assert (split.height, split.width) == ((1, 96, 96), (1, 128, 200))


def test_few_and_missing_classes_are_told_by_name(clean: Path) -> None:
    for number in range(60):
        save(scene(100 + number, 32, 32), clean / "train" / "dog" / f"more{number}.png")
    train = load_pictures(clean)
    test = load_pictures(clean, "test")
    cats = test.subset((test.labels == 0).nonzero()[:, 0])
    splits = examine({"train": train.subset([*range(2), *range(6, len(train))]), "test": cats}, near=False).splits
    assert splits["train"].counts == {"cat": 2, "dog": 66}
    assert splits["train"].imbalance == 33
    assert splits["train"].small == []  # 32 pixels are just enough
    assert splits["train"].few == ["cat"]
    assert (splits["train"].missing, splits["test"].missing) == ([], ["dog"])


def test_a_limit_opens_pictures_spread_over_the_split(clean: Path) -> None:
    findings = found(clean, limit=3)
    assert [split.looked_at for split in findings.splits.values()] == [3, 3]
    assert findings.splits["train"].formats == {"JPEG": 3}
    assert findings.splits["train"].counts == {"cat": 6, "dog": 6}  # labels cost nothing
    with pytest.raises(InputError, match="limit is 0"):
        found(clean, limit=0)
    with pytest.raises(InputError, match="workers is -4"):
        found(clean, workers=-4)


def test_threads_find_what_one_thread_finds(clean: Path) -> None:
    (clean / "train" / "cat" / "bad.jpg").write_bytes(b"no picture")
    (clean / "test" / "dog" / "same.jpg").write_bytes((clean / "train" / "dog" / "5.jpg").read_bytes())
    assert found(clean, workers=3) == found(clean)


def test_arrays_are_compared_as_files_are() -> None:
    pixels = torch.from_numpy(np.stack([np.asarray(scene(n, 28, 28).convert("L")) for n in range(40)]))[:, None]
    test = pixels[30:].clone()
    test[3] = pixels[7]
    test[5] = (pixels[9].float() + 1).clamp(0, 255).byte()
    labels = torch.arange(40) % 2
    findings = examine(
        {
            "train": PictureSet("set/train", ("a", "b"), labels[:30], pixels[:30]),
            "test": PictureSet("set/test", ("a", "b"), labels[30:], test),
        }
    )
    assert told(findings.exact) == [(("set/train/7", "set/test/3"), True, False)]
    assert told(findings.near) == [(("set/train/9", "set/test/5"), True, False)]
    assert findings.splits["train"].formats == {"array": 30}
    assert findings.splits["train"].modes == {"grey": 30}


def sketch(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0))


def groups_of(images: list[Image.Image]) -> list[tuple[int, ...]]:
    return [tuple(group) for group in near_groups(*fingerprints(np.stack([sketch(image) for image in images])))]


def photographs() -> list[Image.Image]:
    data = pytest.importorskip("skimage.data")
    names = (
        "astronaut", "brick", "camera", "chelsea", "clock", "coffee", "coins", "grass", "gravel", "hubble_deep_field",
        "immunohistochemistry", "moon", "page", "retina", "rocket", "text",
    )  # fmt: skip
    images = []
    for name in names:
        try:
            images.append(Image.fromarray(getattr(data, name)()).convert("RGB"))
        except Exception:  # some are fetched when they are asked for
            continue
    assert len(images) >= 10
    return images


def test_no_two_pieces_of_photographs_are_taken_for_copies() -> None:
    pieces = []
    for photograph in photographs():
        for top in range(0, photograph.height - 127, 128):
            for left in range(0, photograph.width - 127, 128):
                pieces.append(photograph.crop((left, top, left + 128, top + 128)))
    assert len(pieces) > 200
    detailed = [piece for piece in pieces if np.asarray(piece.convert("L")).std() > 3]  # black sky is black sky
    assert len(detailed) > 200
    assert groups_of(detailed) == []


@pytest.mark.parametrize("how", ["quality 40", "half", "quarter", "larger", "squeezed"])
def test_every_photograph_is_found_again_after_it_was_resized_and_compressed(how: str) -> None:
    images = photographs()

    def changed(image: Image.Image) -> Image.Image:
        height, width = image.height, image.width
        sizes = {"half": (width // 2, height // 2), "quarter": (width // 4, height // 4)}
        sizes |= {"larger": (width * 4 // 3, height * 4 // 3), "squeezed": (224, 224)}
        file = io.BytesIO()
        smaller = image.resize(sizes[how], Image.Resampling.BICUBIC) if how in sizes else image
        smaller.save(file, "JPEG", quality=40 if how == "quality 40" else 75)
        return Image.open(file)

    count = len(images)
    assert groups_of(images + [changed(image) for image in images]) == [(n, n + count) for n in range(count)]


def test_colour_tells_pictures_apart_that_are_equal_in_grey() -> None:
    image = scene(0)
    red, green, blue = image.split()
    swapped = Image.merge("RGB", (blue, green, red))
    assert groups_of([image, swapped]) == []
    assert groups_of([image, image.resize((70, 50))]) == [(0, 1)]


def test_pictures_that_differ_in_one_small_thing_are_not_copies() -> None:
    images = []
    for seed in range(20):
        marked = scene(seed)
        marked.paste("white" if np.asarray(marked)[40:52, 50:62].mean() < 128 else "black", (50, 40, 62, 52))
        images += [scene(seed), marked]
    hashes, _ = fingerprints(np.stack([sketch(image) for image in images]))
    apart = [bin(int(one) ^ int(other)).count("1") for one, other in zip(hashes[::2], hashes[1::2], strict=True)]
    assert min(apart) <= 6  # by its hash alone such a pair would pass
    assert groups_of(images) == []


def test_bands_miss_no_pair_within_the_radius() -> None:
    random = np.random.default_rng(0)
    hashes = random.integers(0, 1 << 63, 4000, dtype=np.uint64)
    for place in range(1, 4000, 2):  # each odd one differs in up to 8 bits from the one before it
        flips = np.bitwise_or.reduce(np.uint64(1) << random.choice(63, place % 9, replace=False).astype(np.uint64))
        hashes[place] = hashes[place - 1] ^ np.uint64(flips)
    thumbs = np.repeat(random.integers(0, 256, (2000, 16, 16, 3), dtype=np.uint8), 2, axis=0)
    distances = np.array([[bin(int(a) ^ int(b)).count("1") for a, b in zip(hashes[::2], hashes[1::2], strict=True)]])
    wanted = [[2 * place, 2 * place + 1] for place in np.flatnonzero(distances[0] <= 6)]
    assert 1200 < len(wanted) < 2000
    assert near_groups(hashes, thumbs) == wanted


def test_many_equal_looking_pictures_hang_together_in_one_group_in_little_time() -> None:
    pixels = torch.full((3000, 1, 16, 16), 200, dtype=torch.uint8)
    pixels[torch.arange(3000), 0, torch.arange(3000) % 16, torch.arange(3000) // 16 % 16] = 199
    pixels[torch.arange(3000), 0, 15, 15] = (190 + torch.arange(3000) // 256).to(torch.uint8)
    [group] = examine({"all": PictureSet("flat", (), torch.full((3000,), -1), pixels)}).near or []
    assert len(group.pictures) == 3000
