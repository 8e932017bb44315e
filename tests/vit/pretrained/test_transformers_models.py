"""transformers' models that hold a vision transformer among other things, and configurations that do not fit."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from regard.vit import ViT
from regard.vit.errors import InputError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, image_size=64, patch_size=16)
MLP, RATIO = {**SMALL, "intermediate_size": 96}, {**SMALL, "mlp_ratio": 2}
TEXT = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=20)
TOWERS = {"vision_config": MLP, "text_config": TEXT}
# What holds a vision transformer, its configuration, where the tower stands, and what is beside it.
HOLDERS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "ViTForImageClassification": ("ViTConfig", MLP, "vit", "classifier.weight"),
    "ViTForMaskedImageModeling": ("ViTConfig", MLP, "vit", "decoder.0.weight"),
    "Dinov2ForImageClassification": ("Dinov2Config", RATIO, "dinov2", "classifier.weight"),
    "Dinov2WithRegistersForImageClassification": (
        "Dinov2WithRegistersConfig",
        RATIO,
        "dinov2_with_registers",
        "classifier.weight",
    ),
    "Dinov2Backbone": ("Dinov2Config", RATIO, "", ""),
    "Dinov2WithRegistersBackbone": ("Dinov2WithRegistersConfig", RATIO, "", ""),
    "DINOv3ViTBackbone": ("DINOv3ViTConfig", {**MLP, "num_register_tokens": 2}, "", ""),
    "CLIPModel": ("CLIPConfig", TOWERS, "vision_model", "text_model.embeddings.token_embedding.weight"),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", MLP, "vision_model", "visual_projection.weight"),
    "SiglipModel": ("SiglipConfig", TOWERS, "vision_model", "text_model.head.weight"),
}


def built(name: str) -> nn.Module:
    config, fields, _, _ = HOLDERS[name]
    return getattr(transformers, name)(getattr(transformers, config)(**fields))


def tower(model: nn.Module, name: str) -> Any:
    """The plain model whose tokens are known, with the same weights."""
    plain = {"Dinov2Backbone": "Dinov2Model", "Dinov2WithRegistersBackbone": "Dinov2WithRegistersModel"}
    plain |= {"DINOv3ViTBackbone": "DINOv3ViTModel"}
    if name not in plain:
        return model.get_submodule(HOLDERS[name][2])
    inner = getattr(transformers, plain[name])(model.config)
    inner.load_state_dict(model.state_dict())
    return inner.eval()


@pytest.mark.parametrize("name", HOLDERS)
def test_the_tower_is_found_in_a_larger_model_live_and_saved(name, fill, tmp_path):
    model = fill(built(name))
    _, _, prefix, beside = HOLDERS[name]
    model.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        out = tower(model, name)(images)
    for source in (model, tmp_path):
        vit = ViT.from_pretrained(source)
        with torch.no_grad():
            if "CLIP" in name:  # which norms the class token alone
                (tokens,) = vit.intermediates(images, [-1])
                assert torch.allclose(vit(images).cls, out.pooler_output, atol=1e-5)
            else:
                tokens = vit(images)
        assert torch.allclose(tokens.patches, out.last_hidden_state[:, -16:], atol=1e-5)
        assert vit.report.unwrapped == ((f"prefix {prefix + '.'!r}",) if prefix else ())
        assert not beside or any(beside in group for group in vit.report.unused.values())


@pytest.mark.parametrize(
    "name", ["ViTForImageClassification", "Dinov2ForImageClassification", "CLIPModel", "SiglipModel"]
)
def test_wrong_tensors_of_a_tower_are_called_by_their_whole_names(name, fill, four_wrong_files, tmp_path):
    fill(built(name)).save_pretrained(tmp_path)
    disk = load_file(tmp_path / "model.safetensors")

    def attempt(tensors: dict[str, torch.Tensor]) -> ViT:
        save_file(tensors, tmp_path / "model.safetensors")
        return ViT.from_pretrained(tmp_path)

    prefix = HOLDERS[name][2] + "."
    inside = [tensor for tensor in disk if tensor.startswith(prefix) and "mask_token" not in tensor]
    embeddings = [tensor for tensor in inside if "embeddings." in tensor]
    blocks = [tensor for tensor in inside if ".1." in tensor]
    four_wrong_files(disk, attempt, *embeddings, *blocks[::5])


def test_depth_anythings_backbone_opens_with_the_settings_of_its_own_part(fill, tmp_path):
    config = transformers.DepthAnythingConfig(
        backbone_config=transformers.Dinov2Config(**RATIO, layer_norm_eps=0.02, out_indices=[0, 1, 2, 3]),
        patch_size=16,
        reassemble_hidden_size=48,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        head_hidden_size=8,
    )
    model = fill(transformers.DepthAnythingForDepthEstimation(config))
    model.save_pretrained(tmp_path)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        hidden = model.backbone(images, output_hidden_states=True).hidden_states
        for source in (model, tmp_path):
            vit = ViT.from_pretrained(source)
            assert vit.config.norm_eps == 0.02
            for layer, tokens in enumerate(vit.intermediates(images, "all"), start=1):
                assert torch.allclose(tokens.patches, hidden[layer][:, 1:], atol=1e-5)


def test_a_module_of_ones_own_is_read_by_the_settings_of_its_vision_transformer(fill):
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = transformers.BertModel(transformers.BertConfig(**TEXT, layer_norm_eps=0.5))
            self.eyes = transformers.ViTModel(transformers.ViTConfig(**MLP))

    mine = fill(Mine())
    vit = ViT.from_pretrained(mine)
    assert (vit.config.heads, vit.config.norm_eps) == (3, 1e-12)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(vit(images).patches, mine.eyes(images).last_hidden_state[:, 1:], atol=1e-5)


@pytest.mark.parametrize("name", ["BeitModel", "BlipVisionModel", "Siglip2VisionModel"])
def test_a_family_that_only_looks_alike_is_refused(name, fill):
    fields = {**MLP, "num_patches": 16} if name.startswith("Siglip2") else MLP
    model = getattr(transformers, name)(getattr(transformers, name.replace("Model", "Config"))(**fields))
    with pytest.raises(InputError, match=r"layout of its tensors is not known|dimensions were expected|no part"):
        ViT.from_pretrained(fill(model))


def changed(folder, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "relu"}, "activation 'relu' is not known; Regard has gelu, gelu_tanh, quick_gelu, swiglu"),
        ({"hidden_act": "silu"}, "activation 'silu' does not fit its tensors; its MLP has no gate"),
        ({"hidden_act": 3}, "states hidden_act 3, which is of the wrong kind"),
        ({"num_hidden_layers": 4}, r"4 blocks are stated; its tensors are of 3, up to encoder\.layer\.2"),
        ({"num_hidden_layers": 2}, "2 blocks are stated; its tensors are of 3"),
        ({"num_attention_heads": "3"}, "states num_attention_heads '3'"),
        ({"num_attention_heads": 5}, "dim 48 is no multiple of heads 5"),
        ({"layer_norm_eps": [1]}, "states layer_norm_eps"),
        ({"layer_norm_eps": -1.0}, "norm_eps is -1.0"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_an_error_in_one_line(fields, message, tmp_path):
    transformers.ViTModel(transformers.ViTConfig(**MLP)).save_pretrained(tmp_path)
    changed(tmp_path, **fields)
    with pytest.raises(InputError, match=message) as caught:
        ViT.from_pretrained(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_gate_with_another_activation_than_silu_is_refused(tmp_path):
    fields = {**MLP, "use_gated_mlp": True, "hidden_act": "gelu", "num_register_tokens": 1}
    transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**fields)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="activation 'gelu' does not fit its tensors; its MLP has a gate"):
        ViT.from_pretrained(tmp_path)
    changed(tmp_path, hidden_act="silu", rope_theta="wide")
    with pytest.raises(InputError, match="states rope_theta 'wide'; a number was expected"):
        ViT.from_pretrained(tmp_path)


def test_what_the_caller_states_wins_over_the_configuration(tmp_path):
    transformers.ViTModel(transformers.ViTConfig(**MLP)).save_pretrained(tmp_path)
    changed(tmp_path, hidden_act="relu", num_attention_heads=5, layer_norm_eps=1e-3)
    vit = ViT.from_pretrained(tmp_path, activation="gelu_tanh", heads=4, norm_eps=1e-5)
    assert (vit.config.activation, vit.config.heads, vit.config.norm_eps) == ("gelu_tanh", 4, 1e-5)


def test_a_file_that_holds_a_tensor_in_both_dialects_is_refused(fill, tmp_path):
    model = fill(transformers.ViTModel(transformers.ViTConfig(**MLP)))
    model.save_pretrained(tmp_path)
    disk = load_file(tmp_path / "model.safetensors")
    twice = "layers.1.attention.q_proj.weight"
    save_file({**disk, twice: torch.zeros(48, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"layers\.1\.attention\.q_proj\.weight.*no part of the model takes it"):
        ViT.from_pretrained(tmp_path)


def test_a_file_with_a_block_too_many_names_it(fill, tmp_path):
    model = fill(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**MLP)))
    tensors = model.state_dict()
    tensors["encoder.layers.9.layer_norm1.weight"] = torch.zeros(48)
    torch.save(tensors, tmp_path / "odd.pth")
    with pytest.raises(InputError, match=r"missing: encoder\.layers\.3\.layer_norm1\.bias"):
        ViT.from_pretrained(tmp_path / "odd.pth", heads=3)


def test_old_files_of_clip_with_numbered_rows_open(fill, tmp_path):
    tensors = fill(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**MLP))).state_dict()
    torch.save({**tensors, "embeddings.position_ids": torch.arange(17)[None]}, tmp_path / "old.pth")
    vit = ViT.from_pretrained(tmp_path / "old.pth", heads=3)
    assert vit.report.unused == {"numbers of the rows, from 0": ("embeddings.position_ids",)}


def test_siglips_attention_pooling_is_theirs_and_set_aside_for_another(fill):
    model = fill(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**MLP)))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        pooled = model(images).pooler_output
        vit = ViT.from_pretrained(model)
        assert torch.allclose(vit.pool(vit(images)), pooled, atol=1e-5 * pooled.abs().max())
    mean = ViT.from_pretrained(model, pooling="mean")
    assert "head.probe" in mean.report.unused["beside the vision transformer"]
    headless = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**MLP, vision_use_head=False))
    assert ViT.from_pretrained(headless).config.pooling == "mean"


def test_widths_of_published_models_tell_their_heads(tmp_path):
    fields = {"hidden_size": 1280, "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    for model, config, extra, heads in (
        (transformers.DINOv3ViTModel, transformers.DINOv3ViTConfig, {"num_register_tokens": 4}, 20),
        (transformers.ViTModel, transformers.ViTConfig, {}, 16),
    ):
        torch.save(model(config(**fields, num_attention_heads=16, **extra)).state_dict(), tmp_path / "huge.pth")
        vit = ViT.from_pretrained(tmp_path / "huge.pth")
        assert vit.config.heads == heads
        assert any(note.startswith(f"heads {heads}") for note in vit.report.assumed)
