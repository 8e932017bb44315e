"""timm's Eva (EVA, EVA-02, DINOv3, ROPE-ViT): the numbers timm gets, from a live module and from weights alone."""

import pytest
import torch
from safetensors.torch import save_file

from regard.vit import InputError, RopeRecipe, ViT, attention_rows
from regard.vit.pretrained import rules
from regard.vit.pretrained.layouts.eva import LAYOUT

timm = pytest.importorskip("timm", reason="timm is not installed")

GRID = 4
SMALL = dict(embed_dim=48, depth=3, num_heads=3, num_classes=7, dynamic_img_size=True)
RECTANGLE = dict(img_size=(64, 96))
# What each needs said where its weights come alone, besides the number of heads.
ARCHITECTURES = {
    "eva02_small_patch14_224": {},  # fused q, k, v with biases on q and v; SwiGLU in one projection
    "eva02_base_patch14_224": {},  # split q, k, v; SwiGLU in two, with a norm
    "eva02_base_patch16_clip_224": {},  # and a norm inside attention
    "eva_giant_patch14_224": {},  # a learned table alone
    "eva_giant_patch14_clip_224": {},
    "vit_small_patch16_dinov3": {},
    "vit_small_patch16_dinov3_qkvb": {},
    "vit_small_plus_patch16_dinov3": {},
    "vit_7b_patch16_dinov3": {},
    "vit_small_patch16_lingbot": {"pooling": "cls"},
    "vit_medium_patch16_rope_reg1_gap_256": {},  # no class token
    "vit_mediumd_patch16_rope_reg1_gap_256": {},
    "vit_betwixt_patch16_rope_reg4_gap_256": {},
    "vit_small_patch16_rope_224": {},  # the column turns first
    "vit_small_patch16_rope_ape_224": {"positions": "learned+rope"},
}
OPTIONS = {
    "query-key norm": ("eva02_small_patch14_224", dict(qk_norm=True)),
    "query-key norm, split": ("eva02_base_patch14_224", dict(qk_norm=True, scale_attn_inner=True)),
    "query-key norm, the column first": ("vit_small_patch16_rope_224", dict(qk_norm=True)),
    "query-key norm, halves": ("vit_small_patch16_dinov3", dict(qk_norm=True)),
    "fused, SwiGLU with a norm": ("eva02_base_patch14_224", dict(qkv_fused=True)),
    "five channels": ("eva02_small_patch14_224", dict(in_chans=5)),
    "a rectangle with a table": ("eva02_small_patch14_224", dict(img_size=(42, 70))),
    "no layer scale": ("vit_small_patch16_dinov3_qkvb", dict(init_values=None)),
}


@pytest.fixture
def made(fill):
    def make(name, **options):
        patch = int(name.split("patch")[1].split("_")[0])
        return fill(timm.create_model(name, **{"img_size": GRID * patch, **SMALL, **options}))

    return make


@pytest.fixture
def opened(tmp_path):
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
    options = RECTANGLE if "dinov3" in name else {}
    model = made(name, **options)
    vit = ViT.from_pretrained(model)
    assert vit.report.layout == "eva"
    agree(vit, timm_tokens(model))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_of_the_weights_alone_are_timms(name, made, opened, agree, timm_tokens):
    model = made(name)
    size = model.patch_embed.img_size
    vit = opened(
        model.state_dict(), suffix=".pth" if len(name) % 2 else ".safetensors", image_size=size, **ARCHITECTURES[name]
    )
    live = ViT.from_pretrained(model).config
    assert (vit.config.positions, vit.config.norm_eps) == (live.positions, live.norm_eps)
    if "rope" in live.positions:
        assert vit.config.rope == live.rope
    agree(vit, timm_tokens(model))


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_class_open_too(option, made, opened, agree, timm_tokens):
    name, options = OPTIONS[option]
    model = made(name, **options)
    agree(ViT.from_pretrained(model), timm_tokens(model))
    if option != "no layer scale":  # by which the weights alone are known
        agree(opened(model.state_dict(), image_size=model.patch_embed.img_size), timm_tokens(model))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pooled_vector_and_logits_are_timms(name, made, opened):
    model = made(name)
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    with torch.no_grad():
        pooled, logits = model.forward_head(model.forward_features(images), pre_logits=True), model(images)
        for vit in (
            ViT.from_pretrained(model, classes=7),
            opened(model.state_dict(), classes=7, **ARCHITECTURES[name]),
        ):
            for ours, theirs in ((vit.pool(vit(images)), pooled), (vit.classify(images), logits)):
                assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 1e-5


def test_dinov3_pools_as_timm_does_and_says_so(made, opened):
    vit = opened(made("vit_small_patch16_dinov3").state_dict())
    assert vit.config.pooling == "mean"
    assert any("pooling='cls'" in line for line in vit.report.assumed)


_BLOCK = [f"blocks.0.{n}" for n in (
    "norm1.weight", "norm1.bias", "attn.proj.weight", "attn.proj.bias", "norm2.weight", "norm2.bias",
    "mlp.fc2.weight", "mlp.fc2.bias",
)]  # fmt: skip
_FUSED = [f"blocks.0.attn.{n}" for n in ("qkv.weight", "q_bias", "v_bias")]
_SPLIT = [
    f"blocks.0.attn.{n}" for n in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "v_proj.weight", "v_proj.bias")
]
_PLAIN = ["blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias"]
_GATED = [f"blocks.0.mlp.{n}" for n in ("fc1_g.weight", "fc1_g.bias", "fc1_x.weight", "fc1_x.bias")]
_INNER = [f"blocks.1.{n}.{kind}" for n in ("attn.norm", "mlp.norm") for kind in ("weight", "bias")]
_NORMS = [f"blocks.1.attn.{n}.{kind}" for n in ("q_norm", "k_norm") for kind in ("weight", "bias")]
_SCALES = ["blocks.0.gamma_1", "blocks.1.gamma_2"]
_PATCHES, _NORM = ["patch_embed.proj.weight", "patch_embed.proj.bias"], ["norm.weight", "norm.bias"]
WRONG = {
    "eva02_small_patch14_224": ({}, ["cls_token", "pos_embed", "fc_norm.weight", *_PATCHES, *_BLOCK, *_FUSED, *_PLAIN]),
    "eva02_base_patch16_clip_224": ({}, ["cls_token", "pos_embed", *_NORM, *_SPLIT, *_GATED, *_INNER]),
    "eva_giant_patch14_224": ({}, ["cls_token", "pos_embed", *_FUSED, *_PLAIN]),
    "vit_small_plus_patch16_dinov3_qkvb": ({}, ["cls_token", "reg_token", *_FUSED, *_GATED, *_SCALES, *_NORM]),
    "vit_medium_patch16_rope_reg1_gap_256": ({}, ["reg_token", "fc_norm.bias", *_FUSED, *_SCALES]),
    "vit_small_patch16_rope_224": (
        dict(qk_norm=True),
        ["cls_token", *_NORMS, "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_an_error_that_names_the_tensor(name, made, opened, four_wrong_files):
    options, names = WRONG[name]
    tensors = made(name, depth=2, **options).state_dict()
    opened(tensors)
    four_wrong_files(tensors, opened, *names)


def test_registers_that_dinov3_lost_are_missed(made, opened):
    for name in ("vit_small_patch16_dinov3", "vit_small_patch16_dinov3_qkvb", "vit_7b_patch16_dinov3"):
        tensors = made(name).state_dict()
        del tensors["reg_token"]
        with pytest.raises(InputError, match="tensor 'reg_token' is missing"):
            opened(tensors)


UNBUILT = {
    "vit_small_patch16_rope_mixed_224": (r"rope\.freqs", r"rope\.freqs"),
    "vit_pe_core_tiny_patch16_384": ("global_pool 'map'", "norm_pre"),
    "vit_pe_spatial_tiny_patch16_512": ("counted from 1", "norm_pre"),
    "vit_pe_lang_large_patch14_448": ("counted from 1", "norm_pre"),
}


@pytest.mark.parametrize("name", UNBUILT)
def test_what_cannot_be_built_is_an_error_that_names_it(name, made, opened):
    model = made(name)
    live, alone = UNBUILT[name]
    with pytest.raises(InputError, match=live):
        ViT.from_pretrained(model)
    with pytest.raises(InputError, match=alone):
        opened(model.state_dict())


def test_other_kinds_of_attention_are_errors(made, opened):
    with pytest.raises(InputError, match="EvaBlockPostNorm"):
        ViT.from_pretrained(made("eva02_enormous_patch14_clip_224"))
    with pytest.raises(InputError, match="1 heads of keys for 3 of queries"):
        ViT.from_pretrained(made("eva02_base_patch14_224", attn_type="rope", num_kv_heads=1))
    with pytest.raises(InputError, match="RmsNorm"):
        ViT.from_pretrained(made("vit_base_patch16_sapiens2", num_kv_heads=3))
    with pytest.raises(InputError, match="RotaryEmbeddingCat with pairs i, i"):
        ViT.from_pretrained(made("eva02_small_patch14_224", rope_rotate_half=True))
    tensors = made("eva02_small_patch14_224").state_dict()
    bias = {"blocks.0.attn.relative_position_bias_table": torch.zeros(9, 3)}
    with pytest.raises(InputError, match="a BEiT or its kin: its attention has relative positions"):
        opened(tensors | bias)
    with pytest.raises(InputError, match=r"blocks\.0\.attn\.gate\.weight"):
        opened(tensors | {"blocks.0.attn.gate.weight": torch.zeros(48, 48)})


def test_positions_that_the_tensors_do_not_tell_are_reported(made, opened, agree, timm_tokens):
    """DeiT-III's own files have the very tensors of timm's rope_ape models; the report says what was assumed."""
    model = made("vit_small_patch16_rope_ape_224")
    agree(opened(model.state_dict(), positions="learned+rope"), timm_tokens(model))
    deit = made("vit_small_patch16_rope_ape_224", use_rot_pos_emb=False)
    vit = opened(deit.state_dict())
    agree(vit, timm_tokens(deit))
    assert any("learned+rope" in note for note in vit.report.assumed)


def test_a_rope_of_ones_own_is_taken_from_the_module_or_from_the_caller(made, opened, agree, timm_tokens):
    model = made("eva02_small_patch14_224", ref_feat_shape=(3, 5), rope_temperature=500.0)
    rope = RopeRecipe("index", 500.0, (3, 5))
    vit = ViT.from_pretrained(model)
    assert vit.config.rope == rope
    agree(vit, timm_tokens(model))
    agree(opened(model.state_dict(), rope=rope), timm_tokens(model))


def test_what_no_model_of_timms_is_like_opens_when_told_its_rope(made, opened, agree, timm_tokens):
    model = made("eva02_small_patch14_224", use_abs_pos_emb=False)
    agree(ViT.from_pretrained(model), timm_tokens(model))
    with pytest.raises(InputError, match="tensor 'pos_embed' is missing"):
        opened(model.state_dict())
    with pytest.raises(InputError, match="tensor 'pos_embed' is missing"):
        opened(model.state_dict(), positions="rope")
    agree(opened(model.state_dict(), positions="rope", rope=RopeRecipe("index", 1e4, (16, 16))), timm_tokens(model))


def test_a_hub_folder_that_changes_the_rope_asks_for_it(made, tmp_path):
    model = made("eva02_small_patch14_224", rope_temperature=500.0)
    timm.models.save_for_hf(model, tmp_path / "hub", model_args={"num_heads": 3, "rope_temperature": 500.0})
    with pytest.raises(InputError, match="its configuration states rope_temperature; pass rope="):
        ViT.from_pretrained(tmp_path / "hub")
    plain = made("vit_small_patch16_dinov3", global_pool="token")
    timm.models.save_for_hf(plain, tmp_path / "plain", model_args={"num_heads": 3})
    assert ViT.from_pretrained(tmp_path / "plain").config.pooling == "cls"


@pytest.mark.parametrize("name", ["eva02_small_patch14_224", "eva02_base_patch16_clip_224", "vit_small_patch16_dinov3"])
def test_names_lead_there_and_back(name, made):
    """Written under timm's names and read again, the tensors are the same, turned pairs included."""
    vit = ViT.from_pretrained(made(name))
    ours = {name: tensor.detach() for name, tensor in vit.state_dict().items()}
    theirs, left = rules.write(LAYOUT.rules, ours, vit.config)
    assert not left
    again = rules.read(LAYOUT.rules, theirs, vit.config)
    assert not again.unknown
    assert again.tensors.keys() == ours.keys()
    assert all(torch.equal(again.tensors[name], ours[name]) for name in ours)


@pytest.mark.parametrize(
    "name", ["eva02_small_patch14_224", "vit_small_plus_patch16_dinov3", "vit_small_patch16_rope_224"]
)
def test_numbers_stay_the_same_after(name, made, tmp_path):
    vit = ViT.from_pretrained(made(name), classes=7)
    patch = vit.config.patch_size
    images = torch.randn(2, 3, 5 * patch, 3 * patch)

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
    rows = attention_rows(vit, images, queries="patches", layers="all")
    assert rows.patches.isfinite().all()
    tokens, _ = numbers(vit)
    halved, _ = numbers(vit.to(torch.bfloat16))
    assert halved.dtype == torch.bfloat16
    error = (halved.float() - tokens).norm(dim=-1) / tokens.norm(dim=-1)
    assert error.max() < 8 * torch.finfo(torch.bfloat16).eps  # one rounding per layer and branch


def test_channels_can_be_changed(made, opened):
    colour = made("vit_small_patch16_dinov3")
    image = torch.randn(1, 1, 64, 64)
    with torch.no_grad():
        grey = opened(colour.state_dict(), channels=1)
        expected = colour.forward_features(image.expand(-1, 3, -1, -1))
        assert torch.allclose(grey(image).patches, expected[:, 5:], rtol=1e-4, atol=1e-5)
