"""torchvision's `VisionTransformer`: its numbers at its own size, and at others as its resampling makes them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.pretrained import rules
from regard.vit.pretrained.layout import layouts

models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")

SMALL = dict(image_size=64, patch_size=16, num_layers=3, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=7)


def built(**changes: Any):
    return models.VisionTransformer(**{**SMALL, **changes})


def at(model, height: int, width: int):
    """The model that torchvision makes of this one for a square of another size, and the table for any size."""
    if (height, width) == (64, 64):
        return model, model.encoder.pos_embedding
    if height == width:
        other = models.VisionTransformer(**{**SMALL, "image_size": height}).eval()
        state = models.vision_transformer.interpolate_embeddings(height, 16, dict(model.state_dict()))
        other.load_state_dict(state)
        return other, other.encoder.pos_embedding
    table = model.encoder.pos_embedding
    image = table[:, 1:].transpose(1, 2).unflatten(2, (4, 4))
    image = F.interpolate(image, size=(height // 16, width // 16), mode="bicubic", align_corners=True)
    return model, torch.cat((table[:, :1], image.flatten(2).transpose(1, 2)), dim=1)


def theirs(model):
    def run(images: Tensor) -> dict[Any, Tensor]:
        own, table = at(model, *images.shape[2:])
        patches = own.conv_proj(images).flatten(2).transpose(1, 2)
        x = torch.cat((own.class_token.expand(len(images), -1, -1), patches), dim=1) + table
        layers = {}
        for number, layer in enumerate(own.encoder.layers):
            x = layers[number] = layer(x)
        final = own.encoder.ln(x)
        if images.shape[2] == images.shape[3]:  # what its own forward takes
            torch.testing.assert_close(own.heads(final[:, 0]), own(images))
        return {"final": final, 0: layers[0], 1: layers[1]}

    return run


def old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): t for n, t in tensors.items()}


def test_a_live_module_and_its_file_give_torchvisions_tokens(fill, agree, tmp_path):
    model = fill(built())
    agree(ViT.from_pretrained(model), theirs(model))
    torch.save(model.state_dict(), tmp_path / "vit_b_16-c867db91.pth")
    with pytest.raises(InputError, match="pass heads="):
        ViT.from_pretrained(tmp_path / "vit_b_16-c867db91.pth")
    vit = ViT.from_pretrained(tmp_path / "vit_b_16-c867db91.pth", heads=3)
    agree(vit, theirs(model))
    assert vit.report.unused == {"classifier": ("heads.head.weight", "heads.head.bias")}


def test_files_with_the_older_names_of_the_mlp_give_the_same(fill, agree, tmp_path):
    model = fill(built())
    torch.save(old_names(model.state_dict()), tmp_path / "old.pth")
    vit = ViT.from_pretrained(tmp_path / "old.pth", heads=3)
    agree(vit, theirs(model))
    assert "encoder.layers.encoder_layer_0.mlp.linear_1.weight" in vit.report.renamed.values()


def test_the_table_of_names_and_its_inverse_lead_back_to_the_module(fill):
    model = fill(built())
    vit = ViT.from_pretrained(model, classes=7)
    layout = layouts()["torchvision"]
    written, without_place = rules.write((*layout.rules, *layout.classifiers), vit.state_dict(), vit.config)
    assert not without_place
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())


def test_the_classifier_is_kept_on_request_and_gives_their_logits(fill, tmp_path):
    model = fill(built())
    wrapped = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": wrapped, "epoch": 1}, tmp_path / "run.ckpt")
    images = torch.randn(2, 3, 64, 64)
    for source in (model, tmp_path / "run.ckpt"):
        vit = ViT.from_pretrained(source, classes=7, heads=3)
        with torch.no_grad():
            logits = model(images)
            assert torch.allclose(vit.classify(images), logits, rtol=0, atol=1e-5 * logits.abs().max())
    with pytest.raises(InputError, match="a classifier of 7 classes, classes=5 was asked for"):
        ViT.from_pretrained(model, classes=5)


def test_a_classifier_with_a_hidden_layer_is_refused_and_set_aside(fill):
    model = fill(built(representation_size=48))
    with pytest.raises(InputError, match=r"hidden layer, heads\.pre_logits, .* open it without classes="):
        ViT.from_pretrained(model, classes=7)
    assert "hidden layer of the classifier" in ViT.from_pretrained(model).report.unused


def test_its_own_eps_is_followed(fill, agree):
    model = fill(built(norm_layer=lambda dim: torch.nn.LayerNorm(dim, eps=0.03)))
    agree(ViT.from_pretrained(model), theirs(model), only=[(64, 64)])


def test_timms_resampling_by_name(fill):
    vit = ViT.from_pretrained(fill(built()), position_resize="timm")
    assert vit.config.position_resize.antialias
    assert not vit.config.position_resize.align_corners
    with pytest.raises(InputError, match="has no position_resize 'dinov2'"):
        ViT.from_pretrained(built(), position_resize="dinov2")


def test_a_model_saved_and_opened_again_is_the_same_to_the_bit(fill, tmp_path):
    vit = ViT.from_pretrained(fill(built()), classes=7)
    vit.save_pretrained(tmp_path / "ours")
    again = ViT.from_pretrained(tmp_path / "ours")
    assert again.config == vit.config
    images = torch.randn(1, 3, 48, 80)
    with torch.no_grad():
        assert torch.equal(vit.classify(images), again.classify(images))


def test_bfloat16_is_as_near_as_torchvisions_own(fill):
    model = fill(built())
    vit, images = ViT.from_pretrained(model, classes=7), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        exact = model(images)
        ours = vit.to(torch.bfloat16).classify(images.bfloat16()).float()
        own = model.to(torch.bfloat16)(images.bfloat16()).float()
    assert (ours - exact).norm() <= 1.5 * (own - exact).norm()


@pytest.mark.parametrize("old", [False, True], ids=["names now", "older names"])
def test_wrong_files_are_refused_by_the_name_of_the_tensor(old, fill, four_wrong_files, tmp_path):
    tensors = fill(built(num_layers=2)).state_dict()
    tensors = old_names(tensors) if old else tensors

    def attempt(content: dict[str, Tensor]) -> ViT:
        save_file(content, tmp_path / "model.safetensors")
        return ViT.from_pretrained(tmp_path / "model.safetensors", heads=3)

    attempt(tensors)
    kinds = [name for name in tensors if "encoder_layer_0" not in name and not name.startswith("heads")]
    four_wrong_files(tensors, attempt, *([name for name in kinds if "linear_" in name] if old else kinds))


def test_a_model_with_convolutions_before_the_blocks_is_no_vision_transformer_of_ours():
    stem = [models.vision_transformer.ConvStemConfig(out_channels=8, kernel_size=3, stride=16)]
    with pytest.raises(InputError, match="conv_proj"):
        ViT.from_pretrained(built(conv_stem_configs=stem))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("vit_b_16", "IMAGENET1K_V1"),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1"),
        ("vit_l_16", "IMAGENET1K_V1"),
        ("vit_l_16", "IMAGENET1K_SWAG_E2E_V1"),
        ("vit_l_32", "IMAGENET1K_V1"),
        ("vit_h_14", "IMAGENET1K_SWAG_E2E_V1"),
        ("vit_h_14", "IMAGENET1K_SWAG_LINEAR_V1"),
    ],
)
def test_published_weights_are_given_the_preprocessing_that_torchvision_states(name, weights, tmp_path):
    transforms = models.get_model_weights(name)[weights].transforms()
    (size,) = transforms.crop_size
    with torch.device("meta"):
        whole = models.get_model(name, image_size=size)
    layers = len(whole.encoder.layers)
    width, patch = 16 * whole.encoder.layers[0].num_heads, whole.patch_size
    small = models.VisionTransformer(size, patch, layers, width // 16, width, 8)
    torch.save(small.state_dict(), tmp_path / "small.pth")
    ours = ViT.from_pretrained(tmp_path / "small.pth", heads=width // 16).preprocess
    assert ours.size == (size, size)
    assert int(size / ours.crop_ratio) == transforms.resize_size[0]
    assert ours.interpolation == transforms.interpolation.value
    assert (list(ours.mean), list(ours.std)) == (transforms.mean, transforms.std)
