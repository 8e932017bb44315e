"""A newcomer's own checkpoint: timm's ViT, compiled, fine-tuned by a Lightning Trainer, rectangular, 37 classes."""

import argparse
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.vit import ViT
from regard.vit.errors import InputError

timm = pytest.importorskip("timm", reason="timm is not installed")
lightning = pytest.importorskip("lightning", reason="lightning is not installed")

SIZE, CLASSES = (384, 288), 37
HYPER_PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": dict(img_size=SIZE, lr=1e-3),
    "nested": dict(model={"name": "vit_tiny", "args": {"img_size": list(SIZE)}}, data_root=Path("data")),
    "namespace": dict(args=argparse.Namespace(lr=1e-3, data=argparse.Namespace(input_size=(3, *SIZE)))),
    "silent": dict(lr=1e-3),
}


class FineTuned(lightning.LightningModule):
    def __init__(self, **hyper_parameters: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        small = dict(depth=2, img_size=SIZE, num_classes=CLASSES)
        self.model = torch.compile(timm.create_model("vit_tiny_patch16_224", **small), backend="eager")

    def training_step(self, batch: Any, index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, torch.nn.Module]]:
    """By what the hyper-parameters say: the checkpoint a Trainer wrote, and the model it was written of."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    batch = torch.randn(2, 3, *SIZE), torch.randint(CLASSES, (2,))
    made = {}
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    for kind, hyper_parameters in HYPER_PARAMETERS.items():
        module = FineTuned(**hyper_parameters)
        for parameter in module.parameters():  # no bias or scale hides behind its initial 0
            torch.nn.init.normal_(parameter, 0.02, 0.1)
        trainer = lightning.Trainer(max_steps=1, accelerator="cpu", devices=1, default_root_dir=folder, **quiet)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few workers, and of steps that are not logged
            trainer.fit(module, torch.utils.data.DataLoader([tuple(b[i] for b in batch) for i in range(2)], 2))
        trainer.save_checkpoint(folder / kind / "last.ckpt")
        made[kind] = folder / kind / "last.ckpt", module.model._orig_mod.eval()
    return made


def test_the_checkpoint_is_what_a_newcomer_has(runs):
    path, _ = runs["plain"]
    content = torch.load(path, weights_only=False)
    assert {"state_dict", "optimizer_states", "hyper_parameters", "pytorch-lightning_version"} <= content.keys()
    assert all(name.startswith("model._orig_mod.") for name in content["state_dict"])
    assert content["state_dict"]["model._orig_mod.pos_embed"].shape[1] == 24 * 18 + 1


@pytest.mark.parametrize("kind", ["plain", "nested", "namespace"])
def test_it_opens_in_one_line(runs, agree, timm_tokens, kind):
    path, model = runs[kind]
    vit = ViT.from_pretrained(path)
    assert vit.config.image_size == SIZE
    assert (vit.config.grid, vit.config.heads) == ((24, 18), 3)
    report = vit.report
    assert report.layout == "timm"
    assert {"wrapper 'state_dict'", "prefix 'model.'"} <= set(report.unwrapped)
    assert set(report.unused["classifier"]) == {"head.weight", "head.bias"}
    assert any(str(SIZE) in note for note in report.assumed)
    agree(vit, timm_tokens(model), only=[SIZE])


def test_where_nothing_tells_the_size_the_error_lists_what_fits(runs, agree, timm_tokens):
    path, model = runs["silent"]
    with pytest.raises(InputError) as caught:
        ViT.from_pretrained(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    assert "model._orig_mod.pos_embed" in text
    assert "image_size=" in text
    assert str(SIZE) in text
    agree(ViT.from_pretrained(path, image_size=SIZE), timm_tokens(model), only=[SIZE])


def test_a_size_that_does_not_fit_is_refused(runs):
    with pytest.raises(InputError, match=r"\(384, 384\) has 24 x 24 patches.*432"):
        ViT.from_pretrained(runs["plain"][0], image_size=(384, 384))


def test_its_classifier_gives_timms_logits(runs):
    path, model = runs["plain"]
    vit = ViT.from_pretrained(path, classes=CLASSES)
    images = torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        theirs = model(images)
        assert (vit.classify(images) - theirs).norm() <= 1e-5 * theirs.norm()
    with pytest.raises(InputError, match="a classifier of 37 classes, classes=1000"):
        ViT.from_pretrained(path, classes=1000)


def test_off_its_size_it_resamples_as_timm_does(runs, agree, timm_tokens):
    path, trained = runs["plain"]
    other = (320, 352)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=SIZE, num_classes=CLASSES).eval()
    model.load_state_dict(trained.state_dict())
    model.set_input_size(other)
    agree(ViT.from_pretrained(path), timm_tokens(model), only=[other])


def test_heads_of_an_unpublished_width_are_asked_for(runs, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=40, num_heads=5, depth=2, img_size=32)
    torch.save({"state_dict": {f"model.{n}": t for n, t in model.state_dict().items()}}, tmp_path / "last.ckpt")
    with pytest.raises(InputError, match=r"width 40; pass heads="):
        ViT.from_pretrained(tmp_path / "last.ckpt")
    assert ViT.from_pretrained(tmp_path / "last.ckpt", heads=5).config.width_of_head == 8


def test_what_was_opened_saves_and_opens_bit_equal(runs, tmp_path):
    vit = ViT.from_pretrained(runs["namespace"][0], classes=CLASSES)
    vit.save_pretrained(tmp_path / "mine")
    twin = ViT.from_pretrained(tmp_path / "mine")
    assert twin.config == vit.config
    images = torch.randn(1, 3, 160, 64)
    assert torch.equal(twin.classify(images), vit.classify(images))
