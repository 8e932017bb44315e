"""timm's VisionTransformer: the numbers timm gets, from the live module and from its weights alone."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from regard.vit import InputError, PositionResize, ViT

timm = pytest.importorskip("timm", reason="timm is not installed")

GRID = 4
SMALL = dict(embed_dim=48, depth=3, num_heads=3, num_classes=7, dynamic_img_size=True)
# What each architecture needs said where its weights come alone; widths of 48 do not tell the number of heads.
ARCHITECTURES = {
    "vit_small_patch16_224": {},
    "vit_base_patch16_224_miil": {},  # no biases on q, k, v
    "flexivit_small": {},  # position table without a row for the class token
    "deit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},
    "eva_large_patch14_196": {},
    "beit3_base_patch16_224": {},
    "vit_base_patch32_clip_224": {"activation": "gelu"},
    "vit_base_patch32_clip_quickgelu_224": {"activation": "quick_gelu"},
    "vit_base_patch16_siglip_224": {},
    "vit_base_patch32_siglip_256": {"activation": "gelu_tanh"},
    "vit_so400m_patch14_siglip_224": {},
    "vit_base_patch16_siglip_gap_224": {},
    "vit_base_patch32_siglip_gap_256": {"activation": "gelu_tanh"},
    "vit_medium_patch16_gap_240": {},
    "vit_medium_patch16_reg1_gap_256": {},
    "vit_mediumd_patch16_reg4_gap_256": {},
    "vit_so150m2_patch16_reg1_gap_256": {},  # rows for the registers, no class token
    "vit_so150m_patch16_reg4_gap_256": {},
    "vit_so150m_patch16_reg4_map_256": {},
    "vit_small_patch14_dinov2": {},
    "vit_small_patch14_reg4_dinov2": {},
    "vit_giant_patch14_dinov2": {},  # SwiGLU in one projection
    "vit_giant_patch14_reg4_dinov2": {},
    "vit_base_patch14_reg1_tipsv2": {},
    "vit_base_patch16_radio_v3": {"norm_place": "none"},
    "vit_intern300m_patch14_448": {"norm_place": "none"},
}
OPTIONS = {
    "query-key norm": dict(qk_norm=True),
    "norms inside attention and MLP": dict(scale_attn_norm=True, scale_mlp_norm=True),
    "norm inside attention alone": dict(scale_attn_norm=True),
    "mean of patches, norm on all tokens": dict(global_pool="avg", fc_norm=False),
    "mean of patches, norm on the mean": dict(global_pool="avg"),
    "class token, norm on it": dict(fc_norm=True),
    "no class token": dict(class_token=False, global_pool="avg"),
    "five channels": dict(in_chans=5),
    "tanh": dict(act_layer="gelu_tanh"),
    "another MLP width": dict(mlp_ratio=2.7),
    "no positions": dict(pos_embed="none"),
    "a rectangle": dict(img_size=(48, 80)),
}


@pytest.fixture
def made(fill):
    def make(name, **options):
        patch = options.get("patch_size") or int(name.split("patch")[1].split("_")[0]) if "patch" in name else 16
        return fill(timm.create_model(name, **{"img_size": GRID * patch, **SMALL, **options}))

    return make


@pytest.fixture
def opened(tmp_path):
    """A file of tensors, opened as a file."""

    def open_tensors(tensors, *, suffix=".safetensors", **stated):
        path = tmp_path / f"weights{suffix}"
        if suffix == ".safetensors":
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        else:
            torch.save(tensors, path)
        return ViT.from_pretrained(path, **{"heads": 3, **stated})

    return open_tensors


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_of_a_live_module_are_timms(name, made, agree, timm_tokens):
    model = made(name)
    agree(ViT.from_pretrained(model, position_resize="timm"), timm_tokens(model))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_of_the_weights_alone_are_timms(name, made, opened, agree, timm_tokens):
    model = made(name)
    suffix = ".safetensors" if len(name) % 2 else ".pth"
    agree(opened(model.state_dict(), suffix=suffix, position_resize="timm", **ARCHITECTURES[name]), timm_tokens(model))


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_class_open_too(option, made, opened, agree, timm_tokens):
    model = made("vit_small_patch16_224", **OPTIONS[option])
    vit = ViT.from_pretrained(model, position_resize="timm")
    agree(vit, timm_tokens(model))
    stated = {name: getattr(vit.config, name) for name in ("activation", "image_size", "norm_eps")}
    if option == "no positions":
        stated["positions"] = "none"
    alone = opened(model.state_dict(), position_resize="timm", **stated)
    pooling = dict(pooling=vit.config.pooling)  # that is not in the tensors where the norm is on all tokens
    assert dataclasses.replace(alone.config, **pooling, preprocess=vit.preprocess) == vit.config


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pooled_vector_and_logits_are_timms(name, made, opened):
    model = made(name)
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    with torch.no_grad():
        features = model.forward_features(images)
        pooled, logits = model.forward_head(features, pre_logits=True), model(images)
    for vit in (
        lambda **asked: ViT.from_pretrained(model, **asked),
        lambda **asked: opened(model.state_dict(), **ARCHITECTURES[name], **asked),
    ):
        if "distilled" in name:
            with pytest.raises(InputError, match=r"head_dist\.weight"):
                vit(classes=7)
            assert torch.allclose(vit().pool(vit()(images)), features[:, 0], rtol=1e-5, atol=1e-5)
            continue
        kept = vit(classes=7)
        with torch.no_grad():
            for ours, theirs in ((kept.pool(kept(images)), pooled), (kept.classify(images), logits)):
                assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 1e-5
        assert "classifier" not in kept.report.unused
        assert set(vit().report.unused["classifier"]) == {"head.weight", "head.bias"}


def test_dinov2_is_resampled_as_its_authors_do(made, opened, agree, timm_tokens):
    model = made("vit_small_patch14_dinov2")
    authors, timms = ViT.from_pretrained(model), ViT.from_pretrained(model, position_resize="timm")
    assert authors.config.position_resize == PositionResize("bicubic", antialias=False, offset=0.1)

    def as_authors(images):
        height, width = images.shape[2] // 14, images.shape[3] // 14
        table = model.pos_embed[:, 1:].unflatten(1, (GRID, GRID)).permute(0, 3, 1, 2)
        scale = ((height + 0.1) / GRID, (width + 0.1) / GRID)
        if (height, width) != (GRID, GRID):
            table = F.interpolate(table, scale_factor=scale, mode="bicubic")
        other = made("vit_small_patch14_dinov2", img_size=tuple(images.shape[2:]))
        rows = table.permute(0, 2, 3, 1).flatten(1, 2)
        other.load_state_dict({**model.state_dict(), "pos_embed": torch.cat((model.pos_embed[:, :1], rows), dim=1)})
        return timm_tokens(other)(images)

    agree(authors, as_authors)
    images = torch.randn(1, 3, 42, 84)
    with torch.no_grad():
        ours, theirs = authors(images).patches, timms(images).patches
    assert (ours - theirs).norm() / theirs.norm() > 1e-3
    with_registers = ViT.from_pretrained(made("vit_small_patch14_reg4_dinov2"))
    assert with_registers.config.position_resize == PositionResize("bicubic", antialias=True)
    alone = opened(made("vit_small_patch14_dinov2", img_size=518, depth=1).state_dict())  # known by 37 x 37 patches
    assert alone.config.position_resize == authors.config.position_resize
    dino = ViT.from_pretrained(made("vit_small_patch16_224.dino"))
    assert dino.config.position_resize == authors.config.position_resize
    assert ViT.from_pretrained(made("vit_small_patch16_224")).config.position_resize == timms.config.position_resize
    for recipe in ("transformers", "dinov2", "dino", "timm"):
        assert isinstance(ViT.from_pretrained(model, position_resize=recipe), ViT)
    with pytest.raises(InputError, match="no position_resize 'torchvision'"):
        ViT.from_pretrained(model, position_resize="torchvision")


def test_a_module_of_ones_own_class_opens(fill, agree, timm_tokens):
    """Built by the class itself, or by one that inherits from it: without the name of an architecture."""
    base = timm.models.vision_transformer.VisionTransformer

    class Own(base):
        pass

    for kind in (base, Own):
        model = fill(kind(img_size=64, embed_dim=48, depth=3, num_heads=3, init_values=0.1, dynamic_img_size=True))
        agree(ViT.from_pretrained(model), timm_tokens(model), only=[(48, 80)])


def test_a_native_size_that_patches_do_not_divide_is_cut_as_the_convolution_does(made):
    model = made("vit_so400m_patch14_siglip_384", img_size=(62, 76), dynamic_img_size=False)
    vit = ViT.from_pretrained(model)
    assert vit.config.image_size == (62, 76)
    assert vit.config.grid == (4, 5)
    images = torch.randn(1, 3, 62, 76)
    with torch.no_grad():
        assert torch.allclose(vit(images).patches, model.forward_features(images), rtol=1e-5, atol=1e-5)


def test_a_model_without_a_final_norm_gives_others_its_tokens_as_they_are(made):
    vit = ViT.from_pretrained(made("vit_base_patch16_radio_v3"))
    images = torch.randn(1, 3, 48, 80)
    with torch.no_grad():
        assert torch.equal(vit.as_encoder()(images).patches, vit(images).patches)


# One name of each kind of tensor; a register of a model whose table has no row for it can be lost unseen.
_BLOCK = [f"blocks.0.{n}" for n in (
    "norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias",
    "norm2.weight", "norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias",
)]  # fmt: skip
_PATCHES, _NORM = ["patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed"], ["norm.weight", "norm.bias"]
_SCALES = ["blocks.0.ls1.gamma", "blocks.1.ls2.gamma"]
_INNER = [
    f"blocks.1.{n}.{kind}"
    for n in ("attn.q_norm", "attn.k_norm", "attn.norm", "mlp.norm")
    for kind in ("weight", "bias")
]
_POOL = [f"attn_pool.{n}" for n in (
    "latent", "q.weight", "q.bias", "kv.weight", "kv.bias", "proj.weight", "proj.bias", "norm.weight", "norm.bias",
    "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias",
)]  # fmt: skip
WRONG = {
    "vit_small_patch16_224": (["cls_token", *_PATCHES, *_BLOCK, *_NORM], {}),
    "deit_tiny_distilled_patch16_224": (["cls_token", "dist_token", "pos_embed"], {}),
    "deit3_small_patch16_224": (["cls_token", *_PATCHES, *_SCALES, *_NORM], {}),
    "vit_base_patch32_clip_224": (["cls_token", "norm_pre.weight", "norm_pre.bias", *_NORM], {}),
    "vit_base_patch16_siglip_224": (["pos_embed", *_POOL, *_NORM], {}),
    "vit_medium_patch16_reg1_gap_256": (["fc_norm.weight", "fc_norm.bias", *_SCALES], {}),
    "vit_so150m2_patch16_reg1_gap_256": (["reg_token", "pos_embed", "blocks.0.attn.qkv.weight"], {}),
    "vit_giant_patch14_dinov2": ([*_BLOCK[8:], *_SCALES], {}),
    "vit_small_patch14_reg4_dinov2": (["cls_token", "reg_token", "pos_embed"], dict(img_size=518)),
    "vit_small_patch16_224 with norms": (_INNER, dict(qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_an_error_that_names_the_tensor(name, made, opened, four_wrong_files):
    names, options = WRONG[name]
    name = name.split()[0]
    tensors = made(name, depth=2, **options).state_dict()
    stated = ARCHITECTURES[name]
    opened(tensors, **stated)
    four_wrong_files(tensors, lambda content: opened(content, **stated), *names)


UNBUILT = {
    "vit_base_patch16_rpn_224": ("ResPostBlock", "norms after attention and MLP"),
    "vit_small_patch16_18x2_224": ("ParallelThingsBlock", r"blocks\.0\.attns\.0"),
    "vit_base_patch16_xp_224": ("ParallelScalingBlock", r"blocks\.0\.in_proj\.weight"),
    "vit_dwee_patch16_reg1_gap_256": ("DiffAttention", r"blocks\.0\.attn\.lambda_"),
    "test_vit4": ("RmsNorm", r"blocks\.0\.norm1\.weight"),
    "aimv2_large_patch14_224": ("RmsNorm", r"patch_embed\.norm\.weight"),
}


@pytest.mark.parametrize("name", UNBUILT)
def test_what_cannot_be_built_is_an_error_that_names_it(name, made, opened):
    model = made(name)
    live, alone = UNBUILT[name]
    with pytest.raises(InputError, match=live):
        ViT.from_pretrained(model)
    with pytest.raises(InputError, match=alone):
        opened(model.state_dict())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (dict(global_pool="avgmax"), "global_pool 'avgmax'"),
        (dict(global_pool="prr"), "global_pool 'prr'"),
        (dict(global_pool="avg", pool_include_prefix=True), "over class token and registers too"),
        (dict(act_layer="relu"), "ReLU in a Mlp"),
        (dict(patch_size=(8, 16)), r"patch_embed\.proj\.weight has patches of 8 x 16 px"),
    ],
)
def test_a_setting_that_cannot_be_built_is_an_error(options, what, made):
    with pytest.raises(InputError, match=what):
        ViT.from_pretrained(made("vit_small_patch16_224", img_size=64, **options))


def test_what_the_tensors_do_not_tell_is_asked_for(made, opened):
    with pytest.raises(InputError, match="activation='quick_gelu'"):
        opened(made("vit_base_patch32_clip_224").state_dict())
    with pytest.raises(InputError, match="pass heads="):
        opened(made("vit_small_patch16_224").state_dict(), heads=None)
    with pytest.raises(InputError, match="heads=5 do not divide the 48 rows"):
        opened(made("vit_small_patch16_224").state_dict(), heads=5)
    rectangle = made("vit_small_patch16_224", img_size=(48, 112)).state_dict()
    with pytest.raises(InputError, match="pos_embed has 22 rows, for 22 or 21 patches, which make no square"):
        opened(rectangle)
    with pytest.raises(InputError, match=r"image_size \(48, 96\) has 3 x 6 patches of 16 px; pos_embed has 22 rows"):
        opened(rectangle, image_size=(48, 96))
    assert opened(rectangle, image_size=(48, 112)).config.grid == (3, 7)


def test_layer_scale_that_dinov2_lost_is_missed(made, opened):
    tensors = made("vit_small_patch14_dinov2", img_size=518, depth=1).state_dict()
    rest = {name: tensor for name, tensor in tensors.items() if ".ls" not in name}
    with pytest.raises(InputError, match=r"tensor 'blocks\.0\.ls1\.gamma' is missing"):
        opened(rest)


def test_a_run_of_timms_and_an_open_clip_folder_tell_the_architecture(made, opened, tmp_path):
    model = made("vit_base_patch32_clip_quickgelu_224")
    run = tmp_path / "last.pth.tar"
    torch.save({"epoch": 3, "arch": "vit_base_patch32_clip_quickgelu_224", "state_dict": model.state_dict()}, run)
    assert ViT.from_pretrained(run, heads=3).config.activation == "quick_gelu"
    folder = tmp_path / "clip"
    folder.mkdir()
    trunk = {
        f"visual.trunk.{name}": tensor for name, tensor in made("vit_base_patch32_siglip_256").state_dict().items()
    }
    save_file(trunk | {"logit_scale": torch.zeros(())}, folder / "open_clip_model.safetensors")
    tower = {"timm_model_name": "vit_base_patch32_siglip_256", "timm_pool": "map", "image_size": 128}
    config = {"model_cfg": {"embed_dim": 48, "vision_cfg": tower}, "preprocess_cfg": {"resize_mode": "squash"}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    vit = ViT.from_pretrained(folder, heads=3)
    assert (vit.config.activation, vit.config.pooling, vit.preprocess.fit) == ("gelu_tanh", "map", "squash")


def test_a_hub_folder_says_what_its_tensors_do_not(made, tmp_path):
    """As timm pushes it: the architecture's name brings activation and eps, `model_args` what departs from it."""
    for name, options, expected in (
        ("vit_base_patch32_clip_quickgelu_224", {}, dict(activation="quick_gelu", norm_eps=1e-5)),
        ("vit_base_patch32_siglip_256", {}, dict(activation="gelu_tanh", norm_eps=1e-6)),
        ("vit_base_patch32_siglip_256", dict(act_layer="gelu"), dict(activation="gelu")),
        ("vit_base_patch16_radio_v3", {}, dict(norm_place="none", registers=7)),
    ):
        model = made(name, **options)
        folder = tmp_path / name
        timm.models.save_for_hf(
            model, folder, model_args={"num_heads": 3, "img_size": model.patch_embed.img_size, **options}
        )
        vit = ViT.from_pretrained(folder)
        assert {field: getattr(vit.config, field) for field in expected} == expected
        images = torch.randn(1, 3, *model.patch_embed.img_size)
        with torch.no_grad():
            assert torch.allclose(
                vit.pool(vit(images)), model.forward_head(model.forward_features(images), True), atol=1e-5
            )


@pytest.mark.parametrize(
    "name", ["vit_small_patch14_dinov2", "vit_giant_patch14_reg4_dinov2", "vit_base_patch16_siglip_224"]
)
def test_numbers_stay_the_same_after(name, made, tmp_path):
    vit = ViT.from_pretrained(made(name), classes=7)
    images = torch.randn(2, 3, 70, 42) if "14" in name else torch.randn(2, 3, 80, 48)

    def numbers(model):
        with torch.no_grad():
            tokens = model(images)
            return torch.cat((tokens.registers, tokens.patches), dim=1), model.classify(images)

    vit.save_pretrained(tmp_path / "model")
    again = ViT.from_pretrained(tmp_path / "model")
    assert again.config == vit.config
    with torch.device("meta"):
        bare = ViT(vit.config)
    bare = bare.to_empty(device="cpu").eval()
    bare.load_state_dict(vit.state_dict())
    for other in (again, bare):
        for found, expected in zip(numbers(other), numbers(vit), strict=True):
            assert torch.equal(found, expected)
    tokens, _ = numbers(vit)
    halved, _ = numbers(vit.to(torch.bfloat16))
    assert halved.dtype == torch.bfloat16
    error = (halved.float() - tokens).norm(dim=-1) / tokens.norm(dim=-1)
    assert error.max() < 8 * torch.finfo(torch.bfloat16).eps  # one rounding per layer and branch


def test_channels_come_from_the_tensor_and_can_be_changed(made, opened):
    colour = made("vit_small_patch16_224")
    tensors, image = colour.state_dict(), torch.randn(1, 1, 64, 64)
    weight = tensors["patch_embed.proj.weight"]
    with torch.no_grad():
        grey = opened(tensors, channels=1)
        assert grey.config.channels == 1
        expected = colour.forward_features(image.expand(-1, 3, -1, -1))  # grey as three equal channels
        assert torch.allclose(grey(image).patches, expected[:, 1:], rtol=1e-4, atol=1e-5)
        five = opened(tensors, channels=5)
        repeated = weight[:, [0, 1, 2, 0, 1]] * (3 / 5)  # the same brightness
        assert torch.allclose(five.tokenizer.proj.weight, repeated.flatten(1), rtol=1e-6, atol=1e-7)
        assert "patch_embed.proj.weight from 3 to 5 channels" in five.report.resized[0]
        same = opened(made("vit_small_patch16_224", in_chans=5).state_dict(), channels=5)
        assert not same.report.resized
    assert torch.equal(opened(tensors, channels=3).tokenizer.proj.weight, weight.flatten(1))
