"""`regard check`: what a person reads, what a program reads, and how each kind of data set is met."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard.cli import main
from regard.verbs.check import Check, check
from regard.verbs.shard import shard
from regard.vit.errors import InputError


def scene(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((128, 96), Image.Resampling.BICUBIC)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    for number in range(15):
        split = "train" if number < 10 else "val"
        path = tmp_path / "set" / split / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        scene(number).save(path, quality=92)
    return tmp_path / "set"


@pytest.fixture
def faulty(clean: Path) -> Path:
    """Each fault once."""
    train, val = clean / "train", clean / "val"
    whole = (train / "cat" / "0.jpg").read_bytes()
    (train / "cat" / "cut.jpg").write_bytes(whole[:900])
    (train / "dog" / "notes.jpg").write_text("buy milk")
    (val / "cat" / "copy.jpg").write_bytes((train / "cat" / "2.jpg").read_bytes())
    Image.open(train / "dog" / "3.jpg").resize((90, 70)).save(val / "dog" / "small.jpg", quality=75)
    (train / "dog" / "four.jpg").write_bytes((train / "cat" / "4.jpg").read_bytes())
    Image.new("RGB", (1, 1)).save(val / "dog" / "dot.png")
    return clean


def test_a_clean_set_is_fine_in_a_few_lines(clean: Path) -> None:
    found = check(clean)
    assert found.fine
    assert str(found).splitlines() == [
        f"{clean}: no fault found",
        "",
        "train 10 pictures, 2 classes of 5",
        "      height 96, width 128 px; JPEG 10, colour 10",
        "val   5 pictures, 2 classes from 2 (dog) to 3 (cat), imbalance 1.5",
        "      height 96, width 128 px; JPEG 5, colour 5",
        "  - val: few pictures of cat (3), dog (2)",
    ]


def test_every_planted_fault_is_told_worst_first_on_one_screen(faulty: Path) -> None:
    found = check(faulty)
    assert not found.fine
    text = str(found)
    lines = text.splitlines()
    assert lines[0] == (f"{faulty}: 2 broken pictures, 2 pictures in several splits, 1 copy with another label")
    order = [
        "train/cat/cut.jpg: truncated or damaged",
        "train/dog/notes.jpg: not an image",
        "train/cat/2.jpg = val/cat/copy.jpg",
        "train/dog/3.jpg ~ val/dog/small.jpg",
        "train/cat/4.jpg (cat) = train/dog/four.jpg (dog)",
        "1 of 1 x 1 pixel: val/dog/dot.png",
    ]
    places = [text.index(fault) for fault in order]
    assert places == sorted(places)
    assert len(lines) <= 30
    assert max(map(len, lines[1:])) <= 160


def test_hundreds_of_faults_still_fit_on_one_screen(clean: Path) -> None:
    for number in range(200):
        (clean / "train" / "cat" / f"bad{number:03d}.jpg").write_text("not a picture at all")
        (clean / "val" / "dog" / f"same{number:03d}.jpg").write_bytes((clean / "train" / "dog" / "1.jpg").read_bytes())
    text = str(check(clean))
    assert "… and 197 more" in text
    assert "train/dog/1.jpg = val/dog/same000.jpg = val/dog/same001.jpg and 198 more" in text
    assert len(text.splitlines()) <= 30


def test_strange_names_stay_on_one_line_that_any_terminal_prints(clean: Path) -> None:
    for name in ("new\nline.jpg", "esc\x1b[31m.jpg", "latin-\udce9.jpg"):
        (clean / "train" / "cat" / name).write_text("x")
    text = str(check(clean))
    assert text.encode()
    assert "\x1b" not in text
    assert "'train/cat/new\\nline.jpg': not an image" in text
    assert json.dumps(check(clean).as_dict())


def test_json_holds_every_fault_whole(faulty: Path) -> None:
    told = json.loads(json.dumps(check(faulty).as_dict()))
    assert told["fine"] is False
    assert [name for name, _ in told["splits"]["train"]["broken"]] == ["train/cat/cut.jpg", "train/dog/notes.jpg"]
    exact = {
        tuple(p["id"] for p in group["pictures"]): (group["across"], group["conflicting"]) for group in told["exact"]
    }
    assert exact == {
        ("train/cat/2.jpg", "val/cat/copy.jpg"): (True, False),
        ("train/cat/4.jpg", "train/dog/four.jpg"): (False, True),
    }
    [near] = told["near"]
    assert near["pictures"][1] == {"split": "val", "id": "val/dog/small.jpg", "label": "dog"}
    assert told["splits"]["val"]["single"] == ["val/dog/dot.png"]
    assert told["splits"]["train"]["imbalance"] == 7 / 6


def test_one_split_alone_has_no_leak(faulty: Path) -> None:
    found = check(faulty, split="val")
    assert list(found.findings.splits) == ["val"]
    assert found.fine
    assert check(faulty, near=False).findings.near is None


def test_a_split_that_training_would_refuse_is_told_and_still_looked_at(clean: Path) -> None:
    for file in (clean / "val" / "dog").iterdir():
        file.unlink()
    (clean / "val" / "dog").rmdir()
    (clean / "val" / "cat" / "bad.jpg").write_text("x")
    found = check(clean)
    assert not found.fine
    assert found.problems.keys() == {"val"}
    assert "'dog' of train is missing here" in str(found)
    assert found.findings.splits["val"].missing == ["dog"]
    assert len(found.findings.splits["val"].broken) == 1


def test_pictures_in_one_heap_are_fine_without_labels(tmp_path: Path) -> None:
    for number in range(4):
        scene(number).save(tmp_path / f"{number}.png")
    found = check(tmp_path)
    assert found.fine
    assert "all   4 pictures, without labels" in str(found)
    assert "regard train distill" in str(found)


def test_shards_and_lists_without_any_label_are_fine_but_with_some_they_are_not(clean: Path, tmp_path: Path) -> None:
    shard(clean, out=tmp_path / "out", labelled=False)
    assert check(tmp_path / "out").fine
    (tmp_path / "list.csv").write_text("image\nset/train/cat/0.jpg\nset/train/dog/1.jpg\n")
    assert check(tmp_path / "list.csv").fine
    (tmp_path / "list.csv").write_text("image,label\nset/train/cat/0.jpg,cat\nset/train/dog/1.jpg,\n")
    found = check(tmp_path / "list.csv")
    assert not found.fine
    assert "list.csv, line 3" in str(found)
    shard(clean, out=tmp_path / "out", split="val")
    mixed = check(tmp_path / "out")
    assert list(mixed.problems) == ["train"]
    assert "has no label" in mixed.problems["train"]


def test_lists_shards_idx_files_and_questions_are_met_alike(clean: Path, tmp_path: Path) -> None:
    rows = [("train/cat/0.jpg", "cat", "train"), ("train/dog/1.jpg", "dog", "train"), ("val/cat/10.jpg", "cat", "val")]
    rows += [("val/dog/11.jpg", "dog", "val"), ("train/cat/0.jpg", "dog", "val")]
    (clean / "list.csv").write_text("image,label,split\n" + "\n".join(map(",".join, rows)))
    listed = check(clean / "list.csv")
    assert [split.pictures for split in listed.findings.splits.values()] == [2, 3]
    assert [(group.across, group.conflicting) for group in listed.findings.exact] == [(True, True)]

    for split in ("train", "val"):
        shard(clean, out=tmp_path / "shards", split=split, per_shard=4)
    shards = check(tmp_path / "shards")
    assert shards.fine
    assert [split.counts for split in shards.findings.splits.values()] == [
        split.counts for split in check(clean).findings.splits.values()
    ]

    pixels = np.stack([np.asarray(scene(n).convert("L").resize((28, 28))) for n in range(12)])
    for prefix, first, last in (("train", 0, 10), ("t10k", 9, 12)):
        for kind, data in (
            ("images-idx3", pixels[first:last]),
            ("labels-idx1", np.arange(first, last, dtype=np.uint8) % 2),
        ):
            header = struct.pack(f">4B{data.ndim}I", 0, 0, 8, data.ndim, *data.shape)
            (tmp_path / "idx").mkdir(exist_ok=True)
            (tmp_path / "idx" / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + data.tobytes()))
    [leak] = check(tmp_path / "idx").leaks
    assert [picture.id for picture in leak.pictures] == ["idx/train/9", "idx/test/0"]

    questions = check("easy-vqa", limit=20)
    assert {name: split.looked_at for name, split in questions.findings.splits.items()} == {"train": 20, "test": 20}


def test_no_pictures_is_one_line_of_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        check(tmp_path / "nowhere")
    with pytest.raises(InputError, match="no pictures"):
        check(tmp_path)


def test_the_result_is_what_its_name_says(clean: Path) -> None:
    assert isinstance(check(str(clean)), Check)


def test_exact_copies_with_two_labels_are_a_fault_and_near_ones_a_remark(clean: Path) -> None:
    train = clean / "train"
    Image.open(train / "cat" / "4.jpg").resize((90, 70)).save(train / "dog" / "near.jpg", quality=75)
    near = check(clean)
    assert near.fine
    assert "  - 1 group of near copies with different labels" in str(near)
    assert "train/cat/4.jpg (cat) ~ train/dog/near.jpg (dog)" in str(near)
    (train / "dog" / "same.jpg").write_bytes((train / "cat" / "0.jpg").read_bytes())
    for options in ({}, {"near": False}, {"split": "train"}):
        exact = check(clean, **options)  # type: ignore[arg-type]
        assert not exact.fine
        assert "LABELS  1 group of copies with different labels" in str(exact)


def idx(folder: Path, labels: dict[str, list[int]]) -> Path:
    folder.mkdir()
    for split, own in labels.items():
        pixels = np.random.default_rng(len(split)).integers(0, 256, (len(own), 28, 28), dtype=np.uint8)
        for kind, data in (("images-idx3", pixels), ("labels-idx1", np.array(own, np.uint8))):
            header = struct.pack(f">4B{data.ndim}I", 0, 0, 8, data.ndim, *data.shape)
            (folder / f"{split}-{kind}-ubyte").write_bytes(header + data.tobytes())
    return folder


def test_what_training_refuses_is_not_fine(tmp_path: Path) -> None:
    for number in range(3):
        path = tmp_path / "one" / "only" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        scene(number).save(path)
    one = check(tmp_path / "one")
    assert not one.fine
    assert "one class ('only'); to classify takes two at least" in one.problems["all"]
    assert one.findings.splits["all"].counts == {"only": 3}

    ten = list(range(10))
    assert check(idx(tmp_path / "whole", {"train": ten * 2, "t10k": ten})).fine
    assert check(idx(tmp_path / "gap-in-test", {"train": ten * 2, "t10k": [1, 2]})).fine  # which training takes
    gap = check(idx(tmp_path / "gap", {"train": [0, 1, 2], "t10k": ten}))
    assert not gap.fine
    assert "no picture of class '3'" in gap.problems["train"]
    other = check(idx(tmp_path / "other", {"train": ten * 2, "t10k": [*ten, 10]}))
    assert "its classes are not those of other/train" in other.problems["test"]

    (tmp_path / "one" / "list.csv").write_text("image,label\nonly/0.png,a\nonly/1.png,a\n")
    assert not check(tmp_path / "one" / "list.csv").fine


def test_a_missing_shard_ends_the_check_with_its_name(clean: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shard(clean, out=tmp_path / "out", split=split, per_shard=4)
    (tmp_path / "out" / "val-000001.tar").unlink()
    with pytest.raises(InputError, match=r"val-000001\.tar: no such shard"):
        check(tmp_path / "out")
    assert check(tmp_path / "out", split="train").fine


def test_rows_without_a_split_among_others_end_the_check_with_their_line(clean: Path) -> None:
    rows = "image,label,split\ntrain/cat/0.jpg,cat,train\ntrain/dog/1.jpg,dog,train\nval/dog/11.jpg,dog,\n"
    (clean / "list.csv").write_text(rows)
    with pytest.raises(InputError, match=r"list\.csv, line 4: the split is empty"):
        check(clean / "list.csv")


@pytest.mark.parametrize("wrong", [{"workers": -4}, {"limit": 0}, {"limit": -3}])
def test_a_number_that_means_nothing_is_one_line_of_error(clean: Path, wrong: dict[str, int]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(InputError, match=f"{name} is {value}"):
        check(clean, **wrong)  # type: ignore[arg-type]


def test_help_tells_the_exit_codes_and_the_command_gives_them(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "0: fine, 1: something to mend, 2: could not look" in told
    assert main(["check", str(clean)]) == 0
    (clean / "train" / "cat" / "gone.jpg").symlink_to(clean / "nowhere")
    assert main(["check", str(clean)]) == 1
    assert "train/cat/gone.jpg: a link to a file that is not there" in capsys.readouterr().out
    assert main(["check", str(clean / "nowhere")]) == 2
