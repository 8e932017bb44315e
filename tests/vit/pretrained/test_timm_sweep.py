"""Every architecture of timm's that is a VisionTransformer or an Eva: timm's numbers, or one clear error."""

import dataclasses

import pytest
from safetensors.torch import save_file

from regard.vit import InputError, ViT, ViTConfig
from regard.vit.pretrained import settings, timm_module
from regard.vit.pretrained.layout import layouts
from regard.vit.pretrained.source import Source

timm = pytest.importorskip("timm", reason="timm is not installed")

MODULES = {"vision_transformer": 139, "deit": 16, "eva": 43}  # and how many of its architectures open at least
GRID = 4


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_published_widths_are_described_alike_or_refused(module):
    """By the live module, by the `config.json` of its hub folder, and by its tensors alone."""
    guessed = {
        "preprocess",
        "image_size",
        "size_policy",
        "pooling",
        "position_resize",
    }  # `vit.report.assumed` tells of these
    opened = 0
    for name in timm.list_models(module=module):
        model = timm.create_model(name, device="meta", **({} if "sapiens" in name else {"depth": 2}))
        tensors, cfg = model.state_dict(), dict(model.pretrained_cfg)
        said = {"architecture": name, "global_pool": model.global_pool, "pretrained_cfg": cfg}
        live, alone = Source(name, dict(tensors)), Source(name, dict(tensors))
        folder = Source(name, dict(tensors), settings=said, stated=settings.stated(said), processor=cfg)
        try:
            timm_module.describe(live, model)
            expected = _described(live)
        except InputError:
            for source in (folder, alone):
                with pytest.raises(InputError):
                    _described(source)
            continue
        opened += 1
        if "_pe_" in name:  # of the Perception Encoders only live modules open
            continue
        assert _described(folder) == expected, name
        found, asked = _described_or_asked(alone)
        if found is None:
            assert "pass " in asked or "norm_place='none'" in asked, asked
            continue
        fields = [field.name for field in dataclasses.fields(ViTConfig)]
        different = {field for field in fields if getattr(found, field) != getattr(expected, field)}
        # A bare rope_ape file is taken for DeiT-III's, which has the same tensors, and the report says so.
        if "rope_ape" in name:
            different -= {"positions", "rope"}
        assert different <= guessed or name == "vit_base_patch16_gap_224", f"{name}: {different}"
        assert not different or alone.assumed, name
    assert opened >= MODULES[module]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_the_numbers_are_timms_or_none_are_given(module, fill, agree, timm_tokens, tmp_path):
    """Cut down to a width of 48 and 3 blocks on a small grid: as a live module, and as a file that is told the rest."""
    compared = 0
    for name in timm.list_models(module=module):
        small = dict(embed_dim=48, depth=3, num_heads=3, num_classes=7, dynamic_img_size=True)
        if "sapiens" in name:
            small["num_kv_heads"] = 3
        patch = timm.create_model(name, device="meta", **small).patch_embed.patch_size[0]
        model = fill(timm.create_model(name, **small, img_size=GRID * patch))
        file = tmp_path / "weights.safetensors"
        save_file(model.state_dict(), file)
        try:
            vit = ViT.from_pretrained(model, position_resize="timm")
        except InputError as error:
            refused = str(error)
        else:
            agree(vit, timm_tokens(model), only=[(2 * patch, 5 * patch)])
            compared += 1
            if "_pe_" not in name:
                told = ("heads", "activation", "norm_place", "norm_eps", "positions", "image_size")
                stated = {field: getattr(vit.config, field) for field in told}
                alone = ViT.from_pretrained(file, position_resize="timm", **stated)
                agree(alone, timm_tokens(model), only=[(2 * patch, 5 * patch)])
            continue
        assert "which Regard does not build" in refused, refused
        if "enormous" not in name and name != "test_vit3":  # whose tensors are another's at this width
            with pytest.raises(InputError):
                ViT.from_pretrained(file, heads=3, activation="gelu")
    assert compared >= MODULES[module]


def _described(source):
    fitting = [layout for layout in layouts().values() if layout.recognises(source)]
    assert len(fitting) == 1, [layout.name for layout in fitting]
    return ViTConfig(**fitting[0].describe(fitting[0].prepare(source)))


def _described_or_asked(source):
    try:
        return _described(source), ""
    except InputError as error:
        return None, str(error)
