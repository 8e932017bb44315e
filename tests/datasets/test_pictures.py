import json
import os
import pickle

import pytest
import torch
from PIL import Image

from regard.datasets import load_pictures, require_classes, splits_of
from regard.datasets.augment.views import CentreView
from regard.datasets.sources.files import Names
from regard.datasets.sources.folder import picture_files
from regard.train.pictures import PictureBatches
from regard.train.sampling import Draw
from regard.vit.errors import InputError
from regard.vit.preprocess import Preprocess


def picture(path, colour=(1, 2, 3), size=(5, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def folder(root, layout):
    for number, name in enumerate(layout):
        picture(root / name, (number, 0, 0))
    return root


def message(data, split="train", **options) -> str:
    with pytest.raises(InputError) as caught:
        load_pictures(data, split, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ids(pictures) -> list[str]:
    return [pictures.id(index) for index in range(len(pictures))]


# folders -------------------------------------------------------------------------------------------------------------


def test_an_image_folder_is_read_in_the_order_of_its_names(tmp_path):
    names = [
        "train/dog/b.png",
        "train/dog/a.png",
        "train/cat/2/z.png",
        "train/cat/y.PNG",
        "val/dog/v.png",
        "val/cat/v.png",
    ]
    root = folder(tmp_path / "pets", names)
    training = load_pictures(root)
    assert training.name == "pets/train"
    assert training.classes == ("cat", "dog")
    assert ids(training) == ["train/cat/y.PNG", "train/cat/2/z.png", "train/dog/a.png", "train/dog/b.png"]
    assert training.labels.tolist() == [0, 0, 1, 1]
    assert training.image(2).getpixel((0, 0)) == (1, 0, 0)
    assert training.source(2) == str(root / "train/dog/a.png")
    assert training.read(2) == (root / "train/dog/a.png").read_bytes()
    assert ids(load_pictures(str(root), "val")) == ["val/cat/v.png", "val/dog/v.png"]
    assert splits_of(root) == ("train", "val")


def test_what_is_hidden_or_no_picture_is_left_out_and_links_are_followed(tmp_path):
    root = folder(tmp_path / "set", ["a/1.png", "b/1.png", ".hidden/1.png", "a/.2.png", "__MACOSX/a/1.png"])
    (root / "a" / "readme.txt").write_text("no picture")
    (root / "notes.csv").write_text("x")
    folder(tmp_path, ["elsewhere/3.png"])
    os.symlink(tmp_path / "elsewhere", root / "b" / "linked")
    os.symlink(tmp_path / "elsewhere" / "3.png", root / "a" / "link.png")
    os.symlink(root / "b", root / "b" / "round")  # leads back to itself
    assert ids(load_pictures(root)) == ["a/1.png", "a/link.png", "b/1.png", "b/linked/3.png"]


def test_what_is_named_as_a_picture_and_cannot_be_read_is_counted_and_named_when_it_is_read(tmp_path):
    root = folder(tmp_path / "set", ["a/1.png", "b/1.png"])
    os.symlink(tmp_path / "gone.png", root / "a" / "gone.png")
    os.symlink("round.png", root / "a" / "round.png")
    os.symlink(tmp_path / "gone.txt", root / "a" / "notes.txt")  # not named as a picture
    os.mkfifo(root / "b" / "pipe.jpg")
    for labelled in (True, False):
        pictures = load_pictures(root, labelled=labelled)
        assert ids(pictures) == ["a/1.png", "a/gone.png", "a/round.png", "b/1.png", "b/pipe.jpg"]
        for index, why in ((1, "a link to a file that is not there"), (2, "cannot be opened"), (4, "a pipe or a dev")):
            with pytest.raises(InputError, match=f"{pictures.id(index)}: {why}"):
                pictures.image(index)


@pytest.mark.parametrize("bad_images", ["error", "skip", "replace"])
def test_a_link_to_nowhere_is_met_in_training_as_any_broken_picture(bad_images, tmp_path):
    root = folder(tmp_path / "set", ["a/1.png", "b/1.png"])
    os.symlink(tmp_path / "gone.png", root / "a" / "gone.png")
    view = CentreView(Preprocess((8, 8)))
    batches = PictureBatches(load_pictures(root), view, seed=0, bad_images=bad_images)
    draws = [Draw(index, 0, True) for index in range(3)]
    if bad_images == "error":
        with pytest.raises(InputError, match=r"gone\.png: a link to a file that is not there"):
            batches.__getitems__(draws)
        return
    batch = batches.__getitems__(draws)
    assert [name for name, _ in batch.bad] == ["a/gone.png"]
    assert batch.counts.tolist() == [True, bad_images == "replace", True]
    assert ("a/gone.png" in batch.ids) == (bad_images == "skip")


@pytest.mark.parametrize("name", ["val", "train/c", "train/a/deep/er"])
def test_a_folder_that_is_a_link_to_nowhere_is_an_error_and_no_smaller_set(name, tmp_path):
    root = folder(tmp_path / "set", ["train/a/deep/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png"])
    os.symlink(tmp_path / "gone", root / name)
    for labelled in (True, False):
        with pytest.raises(InputError, match=f"{name}: a link that leads nowhere"):
            load_pictures(root, labelled=labelled)


def test_only_links_are_looked_up_one_by_one(tmp_path, monkeypatch):
    root = folder(tmp_path / "set", [f"{name}/{number}.png" for name in "ab" for number in range(20)])
    os.symlink(root / "a" / "1.png", root / "b" / "link.png")
    looked_up = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **options: looked_up.append(str(path)) or stat(path, **options))
    assert len(list(picture_files(root))) == 41
    assert [path for path in looked_up if path.endswith(".png")] == [str(root / "b" / "link.png")]


def test_without_split_folders_everything_is_for_training_and_a_share_is_held_out(tmp_path):
    root = folder(tmp_path / "set", [f"{name}/{number}.png" for name in "abc" for number in range(10)])
    assert splits_of(root) == ()
    assert len(load_pictures(root)) == 30
    assert "hold out a share" in message(root, "val")
    training, held_out = load_pictures(root).split(0.2, 1)
    assert held_out.labels.bincount().tolist() == [2, 2, 2]
    assert sorted(ids(training) + ids(held_out)) == ids(load_pictures(root))
    assert ids(load_pictures(root).split(0.2, 1)[1]) == ids(held_out)
    assert ids(load_pictures(root).split(0.2, 2)[1]) != ids(held_out)


def test_a_class_of_one_picture_stays_in_training_and_a_small_share_still_holds_one_out(tmp_path):
    root = folder(tmp_path / "set", ["one/0.png", *(f"many/{number}.png" for number in range(5))])
    training, held_out = load_pictures(root).split(0.01, 0)
    assert training.labels.bincount().tolist() == [4, 1]
    assert held_out.labels.tolist() == [0]
    with pytest.raises(InputError, match="must lie between 0 and 1"):
        load_pictures(root).split(1.0, 0)
    with pytest.raises(InputError, match="no class has two pictures"):
        load_pictures(folder(tmp_path / "few", ["a/1.png", "b/1.png"])).split(0.5, 0)


@pytest.mark.parametrize(
    ("names", "asked", "found"), [(("train", "test"), "val", "test"), (("training", "valid"), "val", "valid")]
)
def test_splits_have_several_names_and_test_stands_for_a_missing_val(names, asked, found, tmp_path):
    root = folder(tmp_path / "set", [f"{name}/{label}/1.png" for name in names for label in "ab"])
    assert load_pictures(root, asked).name == f"set/{found}"


def test_a_split_that_is_not_there_is_told_with_those_that_are(tmp_path):
    root = folder(tmp_path / "set", ["train/a/1.png", "val/a/1.png"])
    assert message(root, "test").endswith("has no split 'test'; there are train, val")
    assert "choose one of train, val, test" in message(root, "dev")
    assert "no such file or folder" in message(tmp_path / "nowhere")
    folder(root, ["valid/a/1.png"])
    assert "holds both val and valid" in message(root)


def test_a_class_of_val_must_be_one_of_train_and_none_may_be_missing(tmp_path):
    root = folder(tmp_path / "set", ["train/a/1.png", "train/b/1.png", "val/a/1.png"])
    assert "the class 'b' of train is missing" in message(root, "val")
    folder(root, ["val/b/1.png", "val/c/1.png"])
    assert "the class 'c' is not in train" in message(root, "val")
    assert len(load_pictures(root, "val", labelled=False)) == 3


def test_an_empty_class_or_folder_and_loose_pictures_are_named(tmp_path):
    root = folder(tmp_path / "set", ["a/1.png"])
    (root / "b").mkdir()
    assert "no picture of the class 'b'" in message(root)
    (tmp_path / "empty").mkdir()
    assert "holds no pictures" in message(tmp_path / "empty")
    assert "no pictures here" in message(tmp_path / "empty", labelled=False)
    flat = folder(tmp_path / "flat", ["2.png", "1.png", "deep/er/3.png"])
    (flat / "deep" / "er" / "3.png").unlink()
    (flat / "deep" / "er").rmdir()
    (flat / "deep").rmdir()
    assert "lie in no class folder" in message(flat)
    assert ids(load_pictures(flat, labelled=False)) == ["1.png", "2.png"]
    (tmp_path / "notes.txt").write_text("x")
    assert "not a set of pictures" in message(tmp_path / "notes.txt")


def test_without_labels_there_are_no_classes(tmp_path):
    root = folder(tmp_path / "set", ["train/a/1.png", "train/2.png"])
    pictures = load_pictures(root, labelled=False)
    assert (pictures.classes, pictures.labels.tolist()) == ((), [-1, -1])
    assert ids(pictures) == ["train/2.png", "train/a/1.png"]


def test_to_classify_takes_two_classes_and_a_label_for_each_picture(tmp_path):
    one = load_pictures(folder(tmp_path / "one", ["only/1.png", "only/2.png"]))
    with pytest.raises(InputError, match="one class \\('only'\\); to classify takes two"):
        require_classes(one)
    with pytest.raises(InputError, match="no classes"):
        require_classes(one.unlabelled())
    two = load_pictures(folder(tmp_path / "two", ["a/1.png", "b/2.png"]))
    require_classes(two)
    with pytest.raises(InputError, match="no picture of class 'b'"):
        require_classes(two.subset([0]))


def test_a_broken_picture_is_named(tmp_path):
    root = folder(tmp_path / "set", ["a/1.png", "b/2.png"])
    (root / "a" / "1.png").write_bytes(b"no picture")
    pictures = load_pictures(root)
    with pytest.raises(InputError, match=r"^a/1\.png: not an image"):
        pictures.image(0)
    (root / "b" / "2.png").unlink()
    with pytest.raises(InputError, match=r"2\.png: no such file"):
        pictures.read(1)


def test_a_set_goes_to_a_worker_process_and_odd_names_survive(tmp_path):
    root = folder(tmp_path / "set", ["ä b/ñ 1.png", "c/2.png"])
    pictures = pickle.loads(pickle.dumps(load_pictures(root)))
    assert ids(pictures) == ["c/2.png", "ä b/ñ 1.png"]
    names = Names(["x", "", "\udcff", "日本"])
    assert list(names) == ["x", "", "\udcff", "日本"]
    assert list(names.take(torch.tensor([3, 0]))) == ["日本", "x"]
    with pytest.raises(IndexError):
        names[4]


# tables --------------------------------------------------------------------------------------------------------------


def test_a_table_gives_labels_and_splits(tmp_path):
    root = folder(tmp_path, [f"p/{number}.png" for number in range(6)])
    rows = ["p/0.png;10;train;x", "p/1.png;9;training;x", "p/2.png;10;val;", "p/3.png;9;valid;"]
    (root / "list.csv").write_text("\n".join(["file_name;label;split;photographer", *rows]))
    training, held_out = load_pictures(root / "list.csv"), load_pictures(root / "list.csv", "val")
    assert splits_of(root / "list.csv") == ("train", "val")
    assert training.classes == held_out.classes == ("9", "10")
    assert training.labels.tolist() == [1, 0]
    assert ids(held_out) == ["p/2.png", "p/3.png"]
    assert held_out.image(1).getpixel((0, 0)) == (3, 0, 0)


def test_json_lines_without_a_split_are_the_training_set(tmp_path):
    folder(tmp_path, ["1.png", "2.png"])
    rows = [{"image": "1.png", "label": "b"}, {"image": str(tmp_path / "2.png"), "label": "a"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pictures = load_pictures(tmp_path / "list.jsonl")
    assert (pictures.classes, pictures.labels.tolist()) == (("a", "b"), [1, 0])
    assert pictures.image(1).size == (5, 4)
    assert "hold out a share" in message(tmp_path / "list.jsonl", "val")
    assert load_pictures(tmp_path / "list.jsonl", labelled=False).labels.tolist() == [-1, -1]


def test_a_folder_may_hold_one_table_per_split(tmp_path):
    folder(tmp_path, ["1.png", "2.png", "3.png"])
    (tmp_path / "train.csv").write_text("image,label\n1.png,a\n2.png,b\n")
    (tmp_path / "val.csv").write_text("image,label\n3.png,a\n3.png,b\n")
    assert splits_of(tmp_path) == ("train", "val")
    assert load_pictures(tmp_path, "val").labels.tolist() == [0, 1]
    (tmp_path / "val.jsonl").write_text("{}")
    assert "holds both val." in message(tmp_path, "val")


@pytest.mark.parametrize(
    ("text", "split", "expected"),
    [
        ("image,label\n1.png,a\n1.png,\n", "train", "line 3: the label is empty; give one, or remove the row"),
        ("image,category\n1.png,a\n1.png, \n", "train", "line 3: the label is empty; give one, or remove the row"),
        ("image,label\n1.png,a\n,b\n", "train", "line 3: the image is empty; give one, or remove the row"),
        ("image,tag\n1.png,a\n", "train", "line 2: no 'label' here (it has image, tag)"),
        ("picture,label\n1.png,a\n", "train", "line 2: no 'image' here (it has picture, label)"),
        ("image,path,label\n1.png,1.png,a\n", "train", "both 'image' and 'path'"),
        ("image,label\ngone.png,a\n", "train", "line 2: no image file"),
        ("image,label,split\n1.png,a,dev\n", "train", "split 'dev' is unknown"),
        ("image,label,split\n1.png,a,train\n1.png,b,val\n", "val", "line 3: the class 'b' is not in train"),
        ("image,label,split\n1.png,a,train\n1.png,b,train\n1.png,a,val\n", "val", "the class 'b' of train is missing"),
        ("image,label,split\n1.png,a,train\n1.png,b,\n", "train", "line 3: the split is empty, other rows have one"),
        ("image,label,split\n1.png,a,\n1.png,b,val\n", "val", "line 2: the split is empty, other rows have one"),
        ("image,label,split\n1.png,a,train\n", "test", "no split 'test'; there are train"),
        ("image,label\n", "train", "holds no row"),
    ],
)
def test_what_is_wrong_with_a_table_is_told_with_its_line(text, split, expected, tmp_path):
    folder(tmp_path, ["1.png"])
    (tmp_path / "list.csv").write_text(text)
    assert expected in message(tmp_path / "list.csv", split)


@pytest.mark.parametrize("empty", [None, "", "  "])
@pytest.mark.parametrize("column", ["label", "split"])
def test_an_empty_field_of_json_is_told_with_its_line(column, empty, tmp_path):
    folder(tmp_path, ["1.png"])
    rows = [{"image": "1.png", "label": name, "split": "train"} for name in "ab"]
    rows[1][column] = empty
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert f"line 2: the {column} is empty" in message(tmp_path / "list.jsonl")
    del rows[1]["split"]
    rows[1]["label"] = "b"
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match="line 2: the split is empty"):
        splits_of(tmp_path / "list.jsonl")


def test_a_split_column_that_is_empty_all_through_tells_no_split(tmp_path):
    folder(tmp_path, ["1.png"])
    (tmp_path / "list.csv").write_text("image,label,split\n1.png,a,\n1.png,b,\n")
    assert splits_of(tmp_path / "list.csv") == ()
    assert len(load_pictures(tmp_path / "list.csv")) == 2


# ImageNet ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kaggle(tmp_path):
    data = tmp_path / "imagenet" / "ILSVRC" / "Data" / "CLS-LOC"
    folder(data, ["train/n02/n02_1.JPEG", "train/n01/n01_7.JPEG", "val/V_1.JPEG", "val/V_2.JPEG", "test/T_1.JPEG"])
    root = tmp_path / "imagenet"
    (root / "LOC_synset_mapping.txt").write_text("n01 tench, Tinca tinca\nn02 goldfish\nn03 unused\n")
    (root / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\nV_2,n01 1 2 3 4 \nV_1,n02 1 2 3 4 n02 5 6 7 8\n"
    )
    return root


@pytest.mark.parametrize("inner", ["", "ILSVRC"])
def test_imagenet_is_read_as_kaggle_publishes_it(inner, kaggle):
    training, held_out = load_pictures(kaggle / inner), load_pictures(kaggle / inner, "val")
    assert training.classes == held_out.classes == ("n01 tench", "n02 goldfish")
    assert ids(training) == ["train/n01/n01_7.JPEG", "train/n02/n02_1.JPEG"]
    assert ids(held_out) == ["val/V_1.JPEG", "val/V_2.JPEG"]
    assert held_out.labels.tolist() == [1, 0]
    assert held_out.image(0).size == (5, 4)


def test_a_picture_of_imagenet_without_an_answer_is_named(kaggle):
    (kaggle / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nV_1,n02 1 2 3 4\n")
    assert "V_2.JPEG: no row" in message(kaggle, "val")
    (kaggle / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nV_1,n02 1\nV_2,n03 1\n")
    assert "the class 'n03', which is not in train" in message(kaggle, "val")
    (kaggle / "LOC_synset_mapping.txt").write_text("n01 tench\n")
    assert "the class 'n02' is not in LOC_synset_mapping.txt" in message(kaggle)


def test_tables_and_archives_beside_class_folders_do_not_hide_them(tmp_path):
    root = folder(tmp_path / "set", ["train/a/1.png", "train/b/1.png"])
    (root / "train.csv").write_text("image,label\ngone.png,z\n")
    (root / "all.tar").write_bytes(b"what the folders were unpacked from")
    assert load_pictures(root).classes == ("a", "b")
