"""transformers' vision transformers: the numbers transformers gets, in both of its dialects, at any size."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.vit import ViT
from regard.vit.errors import InputError
from regard.vit.pretrained import rules
from regard.vit.pretrained.layout import layouts

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, image_size=64, patch_size=16)
MLP, RATIO = {**SMALL, "intermediate_size": 96}, {**SMALL, "mlp_ratio": 2}
GATED = {**MLP, "use_gated_mlp": True, "hidden_act": "silu"}
TEXT = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=20)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTModel", "ViTConfig", MLP),
    "deit": ("DeiTModel", "DeiTConfig", MLP),
    "dinov2": ("Dinov2Model", "Dinov2Config", RATIO),
    "dinov2_giant": ("Dinov2Model", "Dinov2Config", {**RATIO, "use_swiglu_ffn": True}),
    "dinov2_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", RATIO),
    "dinov2_registers_giant": (
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        {**RATIO, "use_swiglu_ffn": True, "num_register_tokens": 2},
    ),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", {**MLP, "num_register_tokens": 4}),
    "dinov3_gated": ("DINOv3ViTModel", "DINOv3ViTConfig", {**GATED, "num_register_tokens": 2}),
    "dinov3_no_registers": ("DINOv3ViTModel", "DINOv3ViTConfig", {**MLP, "num_register_tokens": 0}),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", MLP),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", MLP),
}
TABLES = [family for family in FAMILIES if "dinov3" not in family]  # those with a position table


def built(family: str, **changes: Any) -> nn.Module:
    model, config, fields = FAMILIES[family]
    return getattr(transformers, model)(getattr(transformers, config)(**{**fields, **changes}))


def any_size(model: Any) -> dict[str, bool]:
    """What transformers must be told to take another size than the native one; DINO's models need no telling."""
    return {} if "DINO" in type(model).__name__.upper() else {"interpolate_pos_encoding": True}


def theirs(model: Any) -> Callable[[Tensor], Mapping[Any, Tensor]]:
    def run(images: Tensor) -> Mapping[Any, Tensor]:
        out = model(images, output_hidden_states=True, **any_size(model))
        final, hidden = out.last_hidden_state, out.hidden_states
        if hasattr(model, "pre_layrnorm"):  # CLIP norms the class token alone; we every token
            torch.testing.assert_close(model.post_layernorm(final)[:, 0], out.pooler_output)
            final = model.post_layernorm(final)
        return {"final": final, 0: hidden[1], 1: hidden[2]}

    return run


def opened(source: Any, family: str, **options: Any) -> ViT:
    resize = "transformers" if family in TABLES else None
    return ViT.from_pretrained(source, position_resize=resize, **options)


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_live_module_and_its_folder_give_transformers_tokens(family, fill, agree, tmp_path):
    model = fill(built(family))
    agree(opened(model, family), theirs(model))
    saved(model, tmp_path)
    agree(opened(tmp_path, family), theirs(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_alone_give_them_too_in_either_dialect(family, fill, agree, tmp_path):
    model = fill(built(family))
    disk = saved(model, tmp_path / "model")
    save_file(disk, tmp_path / "disk.safetensors")
    torch.save(model.state_dict(), tmp_path / "memory.pth")
    if family not in ("clip", "siglip"):
        assert disk.keys() != model.state_dict().keys()
    for name in ("disk.safetensors", "memory.pth"):
        with pytest.raises(InputError, match="pass heads="):
            ViT.from_pretrained(tmp_path / name)
        vit = opened(tmp_path / name, family, heads=3)
        agree(vit, theirs(model))
        assert set(vit.report.renamed.values()) | {n for group in vit.report.unused.values() for n in group} == {
            *(disk if name.startswith("disk") else model.state_dict())
        } - ({"embeddings.register_tokens"} if family == "dinov3_no_registers" else set())


@pytest.mark.parametrize("family", ["vit", "dinov2", "clip", "siglip"])
def test_as_many_patches_in_another_shape_are_resampled(family, fill, agree):
    model = fill(built(family))
    agree(opened(model, family), theirs(model), only=[(32, 128)])


def test_a_rectangular_native_grid_stays_as_it_is(fill, agree, tmp_path):
    model = fill(built("vit", image_size=[64, 96]))
    run = theirs(model)
    model.embeddings.interpolate_pos_encoding = lambda x, height, width: model.embeddings.position_embeddings
    agree(ViT.from_pretrained(model), run, only=[(64, 96)])
    torch.save(model.state_dict(), tmp_path / "alone.pth")
    with pytest.raises(InputError, match=r"24 patches, which is no square grid; pass image_size=.*\(64, 96\)"):
        ViT.from_pretrained(tmp_path / "alone.pth", heads=3)
    agree(ViT.from_pretrained(tmp_path / "alone.pth", heads=3, image_size=(64, 96)), run, only=[(64, 96)])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_configuration_states_is_followed(family, fill, agree, tmp_path):
    act = {} if "gated" in family or "giant" in family else {"hidden_act": "gelu_new"}
    rope = {"rope_theta": 37.0} if "dinov3" in family else {}
    model = fill(
        built(family, layer_norm_eps=0.03, num_attention_heads=6 if "dinov3" not in family else 4, **act, **rope)
    )
    agree(opened(model, family), theirs(model))
    saved(model, tmp_path)
    agree(opened(tmp_path, family), theirs(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_saved_and_opened_again_is_the_same_to_the_bit(family, fill, tmp_path):
    vit = ViT.from_pretrained(fill(built(family)))
    vit.save_pretrained(tmp_path / "ours")
    again = ViT.from_pretrained(tmp_path / "ours")
    assert again.config == vit.config
    images = torch.randn(1, 3, 48, 80)
    with torch.no_grad():
        assert torch.equal(vit(images).patches, again(images).patches)
        assert torch.equal(vit.pool(vit(images)), again.pool(again(images)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_names_and_its_inverse_lead_back_to_the_file(family, fill, tmp_path):
    model = fill(built(family))
    disk = saved(model, tmp_path)
    for source in (tmp_path, model):
        vit = ViT.from_pretrained(source)
        written, without_place = rules.write(layouts()[vit.report.layout].rules, vit.state_dict(), vit.config)
        aside = {name for group in vit.report.unused.values() for name in group} | {"embeddings.register_tokens"}
        assert not without_place
        assert disk.keys() - aside == written.keys() - {"embeddings.register_tokens"}
        assert all(torch.equal(written[name], disk[name]) for name in written)


def test_each_family_brings_its_eps_activation_and_preprocessing(tmp_path):
    expected = {
        "vit": (1e-12, "gelu", "squash", "bilinear", 0.5),
        "dinov2": (1e-6, "gelu", "crop", "bicubic", 0.485),
        "dinov2_giant": (1e-6, "swiglu", "crop", "bicubic", 0.485),
        "dinov3": (1e-5, "gelu", "squash", "bilinear", 0.485),
        "dinov3_gated": (1e-5, "swiglu", "squash", "bilinear", 0.485),
        "clip": (1e-5, "quick_gelu", "crop", "bicubic", 0.48145466),
        "siglip": (1e-6, "gelu_tanh", "squash", "bicubic", 0.5),
    }
    for family, facts in expected.items():
        torch.save(built(family).state_dict(), tmp_path / "alone.pth")
        vit = ViT.from_pretrained(tmp_path / "alone.pth", heads=3)
        config, prepare = vit.config, vit.preprocess
        assert (config.norm_eps, config.activation, prepare.fit, prepare.interpolation, prepare.mean[0]) == facts
        assert any("norm_eps" in note for note in vit.report.assumed)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_as_transformers_own(family, fill):
    model = fill(built(family))
    vit = opened(model, family)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        exact = theirs(model)(images)["final"][:, -16:]
        ours = vit.to(torch.bfloat16)(images.bfloat16()).patches.float()
        own = theirs(model.to(torch.bfloat16))(images.bfloat16())["final"][:, -16:].float()
    assert (ours - exact).norm() <= 1.5 * (own - exact).norm()


@pytest.mark.parametrize(
    ("name", "config", "fields"),
    [
        ("ViTForImageClassification", "ViTConfig", MLP),
        ("DeiTForImageClassification", "DeiTConfig", MLP),
        ("Dinov2ForImageClassification", "Dinov2Config", RATIO),
        ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", RATIO),
        ("SiglipForImageClassification", "SiglipConfig", {"vision_config": MLP, "text_config": TEXT}),
    ],
)
def test_a_classifier_is_kept_on_request_and_gives_their_logits(name, config, fields, fill, tmp_path):
    model = fill(getattr(transformers, name)(getattr(transformers, config)(**fields, num_labels=7)))
    saved(model, tmp_path / "folder")
    wrapped = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, tmp_path / "run.ckpt")
    for source in (model, tmp_path / "folder", tmp_path / "run.ckpt"):
        vit = ViT.from_pretrained(source, classes=7, position_resize="transformers", heads=3)
        for size in ((64, 64), (48, 80)):
            images = torch.randn(2, 3, *size)
            with torch.no_grad():
                logits = model(images, **any_size(model)).logits
                assert torch.allclose(vit.classify(images), logits, rtol=0, atol=1e-5 * logits.abs().max())
        assert ViT.from_pretrained(source, heads=3).report.unused["classifier"]
    with pytest.raises(InputError, match="a classifier of 7 classes, classes=5 was asked for"):
        ViT.from_pretrained(model, classes=5)


def test_clips_classifier_is_refused_rather_than_given_other_numbers(fill):
    config = transformers.CLIPConfig(vision_config=MLP, text_config=TEXT)
    model = fill(transformers.CLIPForImageClassification(config))
    with pytest.raises(InputError, match=r"classifier\.weight takes the mean .* open it without classes="):
        ViT.from_pretrained(model, classes=2)
    ViT.from_pretrained(model)


# Every kind of tensor once: of what two families share, one is tried.
KINDS = {
    "vit": r"(?!pooler).*",
    "deit": r"embeddings\.distillation_token",
    "dinov2": r"(?!.*mask_token).*",
    "dinov2_giant": r".*mlp.*",
    "dinov2_registers": r"embeddings\.register_tokens",
    "dinov3": r"(?!.*mask_token).*",
    "dinov3_gated": r".*mlp.gate.*",
    "clip": r".*",
    "siglip": r"(?!encoder).*",
}


@pytest.mark.parametrize("family", KINDS)
def test_wrong_files_are_refused_by_the_name_of_the_tensor(family, fill, four_wrong_files, tmp_path):
    disk = saved(fill(built(family, num_hidden_layers=1)), tmp_path)

    def attempt(tensors: dict[str, Tensor]) -> ViT:
        save_file(tensors, tmp_path / "model.safetensors")
        return ViT.from_pretrained(tmp_path)

    attempt(disk)
    names = [name for name in disk if re.fullmatch(KINDS[family], name)]
    assert names
    four_wrong_files(disk, attempt, *names)


def test_registers_lost_from_a_file_without_configuration_are_missed_where_anything_tells_of_them(fill, tmp_path):
    config = transformers.Dinov2WithRegistersConfig(**RATIO)
    whole = transformers.Dinov2WithRegistersForImageClassification(config).state_dict()
    cases = {
        "dinov2_with_registers.embeddings.register_tokens": whole,
        "embeddings.register_tokens": built("dinov3_no_registers").state_dict(),
    }
    for lost, tensors in cases.items():
        torch.save({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / "alone.pth")
        with pytest.raises(InputError, match=f"tensor '{lost}' is missing"):
            ViT.from_pretrained(tmp_path / "alone.pth", heads=3)


@pytest.mark.parametrize("family", ["vit", "dinov2", "dinov2_giant", "dinov3_gated"])
def test_a_missing_tensor_is_called_what_its_own_dialect_calls_it(family, fill, tmp_path):
    memory = fill(built(family)).state_dict()
    for lost in [name for name in memory if ".1." in name]:
        torch.save({name: tensor for name, tensor in memory.items() if name != lost}, tmp_path / "memory.pth")
        with pytest.raises(InputError) as caught:
            ViT.from_pretrained(tmp_path / "memory.pth", heads=3)
        assert lost in str(caught.value)
