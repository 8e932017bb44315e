"""Owners with random, non-trivial weights, and how their numbers are compared with ours."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.vit import Tokens, ViT
from regard.vit.errors import InputError

TOLERANCE = 1e-5
sys.path.append(str(Path(__file__).parent))  # tests import `published.py`, which lies here


@pytest.fixture
def fill() -> Callable[[nn.Module], nn.Module]:
    """Fill every parameter with noise: a layer that starts at 0 or 1 would hide what is done with it."""

    def filled(module: nn.Module, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() >= 2 and "token" not in name and "pos" not in name:
                    parameter.copy_(noise * (parameter.shape[1:].numel() ** -0.5))
                elif "norm" in name.lower() and name.endswith("weight"):
                    parameter.copy_(1 + 0.2 * noise)
                else:
                    parameter.copy_(0.5 * noise)
        return module.eval()

    return filled


@pytest.fixture
def sizes() -> Callable[[ViT], list[tuple[int, int]]]:
    """Five sizes in pixels: native, smaller, larger, height != width, one patch high."""

    def five(vit: ViT) -> list[tuple[int, int]]:
        (height, width), patch = vit.config.grid, vit.config.patch_size
        grids = [
            (height, width),
            (height - 1, width - 1),
            (height + 2, width + 2),
            (height + 1, width - 2),
            (1, width + 1),
        ]
        return [(max(h, 1) * patch, max(w, 1) * patch) for h, w in grids]

    return five


@pytest.fixture
def agree(sizes) -> Callable[..., None]:
    """Our tokens against the owner's, at five sizes: last layer, class token, registers, two inner layers.

    `theirs(images)` gives the owner's whole sequences `(B, S, D)` by name: `final` as our forward gives it, and inner
    layers by their number, without the final norm. `lead` is how many special tokens stand before the patches.
    """

    def compare(
        vit: ViT, theirs: Callable[[Tensor], Mapping[Any, Tensor]], *, only: list[tuple[int, int]] | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        for height, width in only or sizes(vit):
            images = torch.randn(2, vit.config.channels, height, width, generator=generator)
            with torch.no_grad():
                expected = dict(theirs(images))
                found: dict[Any, Tokens] = {"final": vit(images)}
                inner = [layer for layer in expected if isinstance(layer, int)]
                assert len(inner) >= 2, "name two inner layers"
                found |= zip(inner, vit.intermediates(images, inner), strict=True)
            for name, tokens in found.items():
                cls = [] if tokens.cls is None else [tokens.cls[:, None]]
                ours = torch.cat([*cls, tokens.registers, tokens.patches], dim=1)
                where = f"{name} at {height} x {width}"
                assert ours.shape == expected[name].shape, where
                for part in (ours, expected[name]):
                    assert part.isfinite().all(), where
                # Each token against its own size, so that no large one hides a wrong small one.
                error = (ours - expected[name]).norm(dim=-1) / expected[name].norm(dim=-1)
                assert error.max() <= TOLERANCE, f"{where}: {error.max():.2g}"

    return compare


@pytest.fixture
def four_wrong_files() -> Callable[..., None]:
    """One tensor deleted, one renamed, one of another shape, one with NaN: four errors that name it."""

    def check(tensors: Mapping[str, Tensor], opened: Callable[[dict[str, Tensor]], Any], *names: str) -> None:
        for name in names:
            assert name in tensors, name
            rest = {other: t for other, t in tensors.items() if other != name}
            wider = torch.cat((tensors[name], tensors[name][..., :1]), dim=-1)
            wrong = {
                "deleted": rest,
                "renamed": {**rest, name + "_odd": tensors[name]},
                "misshapen": {**rest, name: wider},
                "not finite": {**rest, name: torch.full_like(tensors[name], torch.nan)},
            }
            for what, content in wrong.items():
                with pytest.raises(InputError) as caught:
                    opened(dict(content))
                text = str(caught.value)
                assert name in text, f"{what} {name}: {text}"
                assert "\n" not in text

    return check


@pytest.fixture
def timm_tokens() -> Callable[[nn.Module], Callable[[Tensor], Mapping[Any, Tensor]]]:
    """What `agree` asks of a model of timm's: its final sequence, and those after its first two blocks."""

    def of(model: nn.Module) -> Callable[[Tensor], Mapping[Any, Tensor]]:
        def run(images: Tensor) -> Mapping[Any, Tensor]:
            inner: dict[Any, Tensor] = {}
            hooks = [
                model.blocks[i].register_forward_hook(lambda block, given, out, i=i: inner.__setitem__(i, out))  # type: ignore[index, operator]
                for i in (0, 1)
            ]
            try:
                return {"final": model.forward_features(images), **inner}  # type: ignore[operator]
            finally:
                for hook in hooks:
                    hook.remove()

        return run

    return of
