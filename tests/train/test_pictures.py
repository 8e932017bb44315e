from itertools import chain

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch.utils.data import DataLoader

from regard.datasets import PictureSet, load_pictures
from regard.datasets.augment.views import CentreView, CropsView, TrainView
from regard.train import pictures as module
from regard.train.pictures import REPLACEMENTS, PictureBatches, PictureData
from regard.train.sampling import Draw
from regard.vit import Preprocess
from regard.vit.errors import InputError

TRAIN = TrainView((24, 32), color_jitter=0.4, erase=0.5, rand_augment="rand-m9-n2-mstd0.5", shift=2)
CENTRE = CentreView(Preprocess((16, 24), fit="crop"))
CROPS = CropsView(global_size=(24, 32), local_size=(16, 16), local_crops=2)
VIEWS = {"train": TRAIN, "centre": CENTRE, "crops": CROPS}
COUNT = 24


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """24 pictures of many sizes in 3 classes, JPEG and PNG, one of them of 1 x 1."""
    root = tmp_path_factory.mktemp("set")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        size = (1, 1) if number == 7 else tuple(rng.integers(30, 90, 2))
        smooth = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize(size)
        home = root / "abc"[number % 3]
        home.mkdir(exist_ok=True)
        smooth.save(home / f"{number:02}.{'png' if number % 4 == 3 else 'jpg'}")
    return root


@pytest.fixture
def files(root) -> PictureSet:
    return load_pictures(root)


@pytest.fixture
def arrays() -> PictureSet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (COUNT, 3, 28, 20), dtype=torch.uint8, generator=generator)
    return PictureSet("arrays", ("x", "y"), torch.arange(COUNT) % 2, pixels)


def broken(root, tmp_path, numbers) -> PictureSet:
    """The same set in which these files, by their place in it, are half of what they were."""
    pictures = load_pictures(root)
    for index in range(len(pictures)):
        home = tmp_path / pictures.id(index)
        home.parent.mkdir(exist_ok=True)
        data = pictures.read(index)
        home.write_bytes(data[: len(data) // 2] if index in numbers else data)
    return load_pictures(tmp_path)


def draws(*indices: int, epoch: int = 0) -> list[Draw]:
    return [Draw(index, epoch) for index in indices]


def flat(batches) -> list[torch.Tensor]:
    """Everything in these batches that a training could notice."""
    tensors = []
    for batch in batches:
        crops = batch.pixels if isinstance(batch.pixels, list) else [batch.pixels]
        tensors += [*crops, batch.labels, batch.counts, batch.indices, batch.epochs]
    return tensors


def same(ones, others) -> bool:
    ones, others = flat(ones), flat(others)
    assert len(ones) == len(others) > 0
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def data(batches, workers=0, batch=5, **options) -> PictureData:
    made = PictureData(batches, None, batch=batch, seed=3, workers=workers, **options)
    made.setup("fit")
    return made


# what a batch is -----------------------------------------------------------------------------------------------------


def test_a_batch_holds_what_its_draws_name(files):
    batch = PictureBatches(files, CENTRE, seed=0).__getitems__([Draw(5), Draw(0, 2), Draw(0, valid=False)])
    expected = [CENTRE.preprocess.pixels(files.image(index)) for index in (5, 0, 0)]
    assert torch.equal(batch.pixels, torch.stack(expected))
    assert batch.labels.tolist() == files.labels[[5, 0, 0]].tolist()
    assert batch.counts.tolist() == [True, True, False]
    assert batch.ids == [files.id(5), files.id(0), files.id(0)]
    assert (batch.indices.tolist(), batch.epochs.tolist(), batch.bad) == ([5, 0, 0], [0, 2, 0], [])


@pytest.mark.parametrize("kind", ["files", "arrays"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_picture_looks_the_same_whatever_batch_it_is_in(view, kind, request):
    pictures = request.getfixturevalue(kind)
    batches = PictureBatches(pictures, VIEWS[view], seed=1)
    together = batches.__getitems__(draws(*range(COUNT), epoch=2))
    apart = [batches.__getitems__(draws(index, epoch=2)) for index in range(COUNT)]
    whole = together.pixels if isinstance(together.pixels, list) else [together.pixels]
    for crop, pixels in enumerate(whole):
        alone = [one.pixels[crop] if isinstance(one.pixels, list) else one.pixels for one in apart]
        assert torch.equal(pixels, torch.cat(alone))


def test_epochs_and_seeds_draw_other_crops(files):
    first = PictureBatches(files, TRAIN, seed=1).__getitems__(draws(0, 1, 2))
    again = PictureBatches(files, TRAIN, seed=1).__getitems__(draws(0, 1, 2, epoch=1))
    other = PictureBatches(files, TRAIN, seed=2).__getitems__(draws(0, 1, 2))
    for row in range(3):
        assert not torch.equal(first.pixels[row], again.pixels[row])
        assert not torch.equal(first.pixels[row], other.pixels[row])


def test_a_picture_of_one_pixel_works_in_every_view(files):
    index = next(index for index in range(COUNT) if files.image(index).size == (1, 1))
    for view in VIEWS.values():
        batch = PictureBatches(files, view, seed=0).__getitems__(draws(index, 0))
        assert batch.counts.all()
    colour = torch.tensor(files.image(index).getpixel((0, 0)), dtype=torch.uint8)
    plain = PictureBatches(files, TrainView((8, 8)), seed=0).__getitems__(draws(index)).pixels[0]
    assert torch.equal(plain, colour[:, None, None].expand(3, 8, 8))


def test_grey_pictures_go_to_a_model_of_three_channels_and_back(arrays, files):
    grey = PictureSet("grey", (), torch.full((COUNT,), -1), arrays.pixels[:, :1].contiguous())
    assert PictureBatches(grey, TRAIN, seed=0).__getitems__(draws(1, 2)).pixels.shape == (2, 1, 24, 32)
    assert PictureBatches(grey, TRAIN, seed=0, channels=3).__getitems__(draws(1, 2)).pixels.shape == (2, 3, 24, 32)
    assert PictureBatches(files, TRAIN, seed=0, channels=1).__getitems__(draws(1, 2)).pixels.shape == (2, 1, 24, 32)


# who makes it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "view"), [("files", "train"), ("files", "crops"), ("arrays", "train")])
def test_batches_do_not_depend_on_the_number_of_workers(kind, view, request):
    batches = PictureBatches(request.getfixturevalue(kind), VIEWS[view], seed=1)
    here = list(data(batches).train_dataloader())
    for workers in (1, 2):
        assert same(here, data(batches, workers).train_dataloader())


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_two_ranks_see_the_batches_of_one(kind, request):
    batches = PictureBatches(request.getfixturevalue(kind), TRAIN, seed=1)

    def of(rank: int, world: int, batch: int):
        made = PictureData(batches, None, batch=batch, seed=3, workers=0)
        made.trainer = type("Ranks", (), {"global_rank": rank, "world_size": world})()
        made.setup("fit")
        return list(made.train_dataloader())

    one, first, second = of(0, 1, 8), of(0, 2, 4), of(1, 2, 4)
    for whole, left, right in zip(one, first, second, strict=True):
        assert torch.equal(whole.pixels, torch.cat((left.pixels, right.pixels)))
        assert whole.ids == left.ids + right.ids


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_goes_on_from_any_batch_bit_for_bit(workers, files):
    made = data(PictureBatches(files, TRAIN, seed=1), workers)
    made.train_batches.set_position(2)
    loader = made.train_dataloader()
    whole = list(loader)
    assert len(whole) == 4
    made.train_batches.set_position(2, 3)
    assert same(whole[3:], loader)


def test_kept_pictures_are_decoded_once_and_look_the_same(files, monkeypatch):
    plain, keeping = PictureBatches(files, TRAIN, seed=1), PictureBatches(files, TRAIN, seed=1, keep=True)
    expected = [plain.__getitems__(draws(0, 1, 2, epoch=epoch)) for epoch in (0, 1)]
    first = keeping.__getitems__(draws(0, 1, 2))
    monkeypatch.setattr(type(files.files), "read", lambda *_: pytest.fail("was read again"))
    assert same(expected, [first, keeping.__getitems__(draws(0, 1, 2, epoch=1))])


def test_no_more_is_kept_than_the_memory_for_it(files, monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 1)
    keeping = PictureBatches(files, CENTRE, seed=1, keep=True)
    expected = PictureBatches(files, CENTRE, seed=1).__getitems__(draws(*range(COUNT)))
    assert same([expected], [keeping.__getitems__(draws(*range(COUNT)))])
    assert len(keeping.kept) == 1


# bad pictures --------------------------------------------------------------------------------------------------------


def test_a_bad_picture_ends_a_training_that_did_not_say_otherwise(root, tmp_path):
    batches = PictureBatches(broken(root, tmp_path, {2}), TRAIN, seed=1)
    with pytest.raises(InputError, match=r"^a/06\.jpg: truncated or damaged"):
        batches.__getitems__(draws(1, 2))
    with pytest.raises(InputError, match="choose one of error, skip, replace"):
        PictureBatches(batches.pictures, TRAIN, seed=1, bad_images="ignore")


@pytest.mark.parametrize("view", VIEWS)
def test_a_skipped_picture_is_blank_and_does_not_count(view, root, files, tmp_path):
    half = PictureBatches(broken(root, tmp_path, {2, 9}), VIEWS[view], seed=1, bad_images="skip")
    whole = PictureBatches(files, VIEWS[view], seed=1)
    batch, expected = half.__getitems__(draws(1, 2, 9, 3)), whole.__getitems__(draws(1, 2, 9, 3))
    assert batch.counts.tolist() == [True, False, False, True]
    assert [name for name, _ in batch.bad] == [files.id(2), files.id(9)]
    for crop, other in zip(flat([batch])[:-4], flat([expected])[:-4], strict=True):
        assert torch.equal(crop[[0, 3]], other[[0, 3]])
        assert not crop[[1, 2]].any()
    assert torch.equal(batch.labels, expected.labels)


@pytest.mark.parametrize("view", VIEWS)
def test_a_replaced_picture_is_another_one_as_it_would_have_been_drawn_itself(view, root, tmp_path):
    batches = PictureBatches(broken(root, tmp_path, {2, 9}), VIEWS[view], seed=1, bad_images="replace")
    batch = batches.__getitems__(draws(1, 2, 9, 3, epoch=5))
    assert batch.counts.all()
    assert batch.indices[[0, 3]].tolist() == [1, 3]
    assert not {2, 9} & set(batch.indices.tolist())
    assert same([batch], [batches.__getitems__(draws(*batch.indices.tolist(), epoch=5))])
    assert batch.ids == [batches.pictures.id(index) for index in batch.indices.tolist()]
    assert same([batch], [batches.__getitems__(draws(1, 2, 9, 3, epoch=5))])
    chosen = {int(batches.__getitems__(draws(2, epoch=epoch)).indices) for epoch in range(8)}
    assert len(chosen) > 1, "every epoch has the same replacement"


def test_replacements_do_not_depend_on_the_batch(root, tmp_path):
    batches = PictureBatches(broken(root, tmp_path, set(range(0, COUNT, 2))), CENTRE, seed=1, bad_images="replace")
    together = batches.__getitems__(draws(*range(COUNT)))
    apart = [batches.__getitems__(draws(index)) for index in range(COUNT)]
    assert together.indices.tolist() == [int(one.indices) for one in apart]
    assert set(together.indices.tolist()) <= set(range(1, COUNT, 2))


def test_a_whole_bad_batch_is_blank_or_replaced_and_a_whole_bad_set_is_an_error(root, tmp_path):
    one_good = broken(root, tmp_path, set(range(COUNT)) - {5, 6, 7, 8, 10, 11})
    skipped = PictureBatches(one_good, TRAIN, seed=1, bad_images="skip").__getitems__(draws(0, 1, 2))
    assert not skipped.counts.any()
    assert not skipped.pixels.any()
    replaced = PictureBatches(one_good, TRAIN, seed=1, bad_images="replace").__getitems__(draws(0, 1, 2))
    assert replaced.counts.all()
    assert set(replaced.indices.tolist()) <= {5, 6, 7, 8, 10, 11}
    none = PictureBatches(one_good.subset([0, 1, 2]), TRAIN, seed=1, bad_images="replace")
    with pytest.raises(InputError, match=f"{REPLACEMENTS + 1} pictures drawn in a row cannot be read"):
        none.__getitems__(draws(0))


def test_a_missing_file_is_a_bad_picture(root, tmp_path):
    pictures = broken(root, tmp_path, set())
    (tmp_path / pictures.id(4)).unlink()
    batch = PictureBatches(pictures, CENTRE, seed=0, bad_images="skip").__getitems__(draws(3, 4))
    assert batch.counts.tolist() == [True, False]
    assert "no such file" in batch.bad[0][1]


class Sums(LightningModule):
    """Trains one number on the mean of the pixels."""

    def __init__(self):
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, number):
        self.seen += batch.indices[batch.counts].tolist()
        return self.number * batch.pixels[batch.counts].float().mean()

    def validation_step(self, batch, number):
        assert batch.counts.dtype == torch.bool

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(made: PictureData, epochs: int) -> Sums:
    task = Sums()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    Trainer(accelerator="cpu", max_epochs=epochs, **quiet).fit(task, made)
    return task


@pytest.mark.parametrize("workers", [0, 1])
def test_each_bad_picture_is_told_once_in_a_training_of_several_epochs(workers, root, tmp_path, capfd):
    pictures = broken(root, tmp_path, {2, 9})
    batches = PictureBatches(pictures, CENTRE, seed=1, bad_images="skip")
    made = PictureData(batches, batches, batch=4, seed=3, workers=workers)
    task = train(made, epochs=2)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("bad picture")]
    assert [line.split(":")[0] for line in told] == ["bad picture 1", "bad picture 2"]
    assert sorted(made.bad) == sorted([pictures.id(2), pictures.id(9)])
    assert all(sum(name in line for line in told) == 1 for name in made.bad)
    assert sorted(task.seen) == sorted(2 * [index for index in range(COUNT) if index not in (2, 9)])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_picture_in_a_worker_is_the_same_one_line(workers, root, tmp_path):
    made = PictureData(
        PictureBatches(broken(root, tmp_path, {2}), CENTRE, seed=1), None, batch=4, seed=3, workers=workers
    )
    with pytest.raises(InputError, match=r"^a/06\.jpg: truncated or damaged [^\n]*$"):
        train(made, epochs=1)


# sizes ---------------------------------------------------------------------------------------------------------------


def test_a_set_too_small_for_a_batch_on_every_device_is_told_what_to_do(files):
    batches = PictureBatches(files, CENTRE, seed=0)
    with pytest.raises(InputError, match=r"24 pictures are too few for a batch of 25 on 1 device.*lower the batch"):
        data(batches, batch=25)
    assert len(data(batches, batch=25, drop_last=False).train_dataloader()) == 1
    made = PictureData(PictureBatches(files.subset([0, 1]), CENTRE, seed=0), None, batch=1, seed=0, workers=0)
    made.trainer = type("Ranks", (), {"global_rank": 0, "world_size": 3})()
    with pytest.raises(InputError, match=r"2 pictures are too few .* on 3 device\(s\), which takes 3"):
        made.setup("fit")


def test_every_held_out_picture_counts_once_over_all_ranks(files):
    batches = PictureBatches(files.subset(range(23)), CENTRE, seed=0)
    for world in (1, 2, 3):
        counted = []
        for rank in range(world):
            made = PictureData(batches, batches, batch=2, eval_batch=4, seed=0, workers=0)
            made.trainer = type("Ranks", (), {"global_rank": rank, "world_size": world})()
            made.setup("fit")
            loader = made.val_dataloader()
            assert isinstance(loader, DataLoader)
            counted += chain.from_iterable(batch.indices[batch.counts].tolist() for batch in loader)
        assert sorted(counted) == list(range(23))
    assert data(batches).val_dataloader() == []
