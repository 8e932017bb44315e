"""PCA maps: what patches have in common, as three colours that mean the same in every picture they are fitted on.

Features are summed up into one D x D matrix as the pictures pass, so a set or a video is fitted in the memory of one
picture. D width, P components.
"""

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.vit.errors import InputError
from regard.vit.files import typed_path, write_atomically
from regard.vit.maps.trace import plain
from regard.vit.model import ViT
from regard.vit.preprocess import Picture
from regard.vit.tokens import Tokens

Images = Tensor | Picture | Iterable[Any]
_ARRAYS = {"mean": 1, "components": 2, "spread": 1, "share": 1}  # and their dimensions


@dataclass(frozen=True, eq=False)
class PatchBasis:
    """Directions in which patch features differ most, in float64; one basis serves any number of pictures.

    Attributes:
        mean: `(D,)`.
        components: `(P, D)`, orthonormal, the widest first. The border of the pictures lies on the negative side.
        spread: standard deviation along each `(P,)`.
        share: of the whole variance `(P,)`.
        layer: whose tokens these are, counted from 0.
        norm: whether they are taken after the final norm.
        patches: how many it was fitted on.
    """

    mean: Tensor
    components: Tensor
    spread: Tensor
    share: Tensor
    layer: int
    norm: bool
    patches: int

    def project(self, patches: Tensor) -> Tensor:
        """Features `(…, D)` to coordinates `(…, P)` in units of their spread: about -3 to 3. A flat direction is 0."""
        if patches.shape[-1] != len(self.mean):
            raise InputError(f"this basis is of {len(self.mean)} wide tokens, not of {patches.shape[-1]}")
        along = (patches.double() - self.mean.to(patches.device)) @ self.components.T.to(patches.device)
        flat = self.spread <= 1e-9 * self.mean.abs().amax().clamp_min(1.0)
        return along / self.spread.masked_fill(flat, torch.inf).to(along)

    def save(self, path: str | Path) -> Path:
        """Write an `.npz`, whole or not at all. Raises InputError where the place cannot be written."""
        path = typed_path(path)
        if path.suffix != ".npz":
            raise InputError(f"{path}: a basis is written as .npz; give a name ending in .npz")
        arrays: dict[str, Any] = {name: getattr(self, name).cpu().numpy() for name in _ARRAYS}
        arrays |= {"layer": self.layer, "norm": self.norm, "patches": self.patches}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: np.savez(file, **arrays))
        except OSError as error:
            raise InputError(f"cannot write {path} ({error.strerror or error}); choose another place") from error
        return path

    @classmethod
    def load(cls, path: str | Path) -> "PatchBasis":
        """Open what `save` wrote. Raises InputError for a file that is something else; nothing in it is executed."""
        path = typed_path(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                found = dict(file)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
            raise InputError(f"{path}: no basis can be read from it ({error}); give one written by `save`") from error
        if missing := [name for name in (*_ARRAYS, "layer", "norm", "patches") if name not in found]:
            raise InputError(f"{path}: no basis of PCA maps, it lacks {', '.join(missing)}; give one written by `save`")
        for name, dims in _ARRAYS.items():
            if found[name].ndim != dims or found[name].dtype.kind != "f" or not np.isfinite(found[name]).all():
                raise InputError(
                    f"{path}: {name} is {found[name].dtype} {found[name].shape} or not finite; fit it anew"
                )
        components, dim = found["components"].shape
        shapes = {"mean": (dim,), "spread": (components,), "share": (components,)}
        if wrong := [name for name, shape in shapes.items() if found[name].shape != shape]:
            raise InputError(f"{path}: {wrong[0]} is {found[wrong[0]].shape} beside components {(components, dim)}")
        arrays: dict[str, Any] = {name: torch.from_numpy(found[name]).double() for name in _ARRAYS}
        arrays |= {"layer": int(found["layer"]), "norm": bool(found["norm"]), "patches": int(found["patches"])}
        return cls(**arrays)


@torch.no_grad()
def fit_basis(
    model: nn.Module,
    images: Images,
    layer: int = -1,
    *,
    components: int = 3,
    norm: bool = True,
    masks: Sequence[Tensor] | None = None,
) -> PatchBasis:
    """The principal components of the patch tokens of all images together, of whatever sizes; class and registers out.

    Args:
        model: a `ViT`, compiled or not.
        images: a preprocessed batch `(B, C, height, width)`, a picture, or any iterable of either, such as the frames
            of a video, taken one at a time.
        layer: whose tokens, counted from the end if negative.
        components: P.
        norm: take the tokens through the final norm.
        masks: for each image the patches to fit on, bool `(grid height, grid width)`: the foreground alone, say.

    The sign is fixed: on average the outermost patches lie on the negative side of those further in. Where that does
    not decide (grids without an inside), the component's largest entry is positive.
    Raises InputError for too few patches, a layer that does not exist and masks that do not fit.
    """
    vit = plain(model)
    (number,) = vit.layer_numbers(layer)
    sums = _Sums(vit.config.dim)
    left = None if masks is None else list(masks)
    for tokens in _tokens(vit, images, number, norm):
        for features in tokens.patches:
            wanted = None
            if left is not None:
                wanted = _wanted(left, tokens.grid)
            sums.add(features.double().cpu(), tokens.grid, wanted)
    if left:
        raise InputError(f"{len(left)} masks are left over; give one for each image")
    return sums.basis(components, number, norm)


@torch.no_grad()
def pca_maps(model: nn.Module, images: Images, basis: PatchBasis) -> Iterator[Tensor]:
    """For each image its coordinates `(grid height, grid width, P)` in the basis, in units of the basis' spread."""
    vit = plain(model)
    for tokens in _tokens(vit, images, basis.layer, basis.norm):
        yield from basis.project(tokens.patches).unflatten(1, tokens.grid)


def pca_colours(coordinates: Tensor) -> Tensor:
    """Coordinates `(…, P)` to values in 0..1, the same for every picture: sigmoid of twice (Siméoni et al., 2025)."""
    return torch.sigmoid(2 * coordinates)


class _Sums:
    """Count, sum and second moments of features, and of those at the border."""

    def __init__(self, dim: int):
        self.count, self.at_border = 0, 0
        self.total, self.border = torch.zeros(2, dim, dtype=torch.float64)
        self.products = torch.zeros(dim, dim, dtype=torch.float64)
        self.origin: Tensor | None = None

    def add(self, features: Tensor, grid: tuple[int, int], wanted: Tensor | None) -> None:
        if self.origin is None:  # moments about a point among the features lose no digits to their common part
            self.origin = features.mean(dim=0)
        edge = torch.ones(grid, dtype=torch.bool)
        edge[1:-1, 1:-1] = False
        features, edge = features - self.origin, edge.flatten()
        if wanted is not None:
            features, edge = features[wanted], edge[wanted]
        self.count += len(features)
        self.total += features.sum(dim=0)
        self.products += features.T @ features
        self.at_border += int(edge.sum())
        self.border += features[edge].sum(dim=0)

    def basis(self, components: int, layer: int, norm: bool) -> PatchBasis:
        if not 1 <= components <= len(self.total):
            raise InputError(f"{components} components of tokens {len(self.total)} wide; choose 1 to {len(self.total)}")
        if self.origin is None or self.count <= components:
            raise InputError(f"{components} components need more than {components} patches, not {self.count}")
        mean = self.total / self.count
        variances, axes = torch.linalg.eigh(self.products / self.count - mean.outer(mean))
        variances = variances.flip(0).clamp_min(0)
        axes = axes.flip(1)[:, :components].T
        share = variances[:components] / variances.sum().clamp_min(1e-300)
        spread = variances[:components].sqrt()
        return PatchBasis(self.origin + mean, axes * self._signs(axes, spread), spread, share, layer, norm, self.count)

    def _signs(self, axes: Tensor, spread: Tensor) -> Tensor:
        largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)).sign()
        inside = self.count - self.at_border
        if not self.at_border or not inside:
            return largest
        further_out = axes @ (self.border / self.at_border - (self.total - self.border) / inside)
        decided = further_out.abs() > 1e-6 * spread
        return torch.where(decided[:, None], -further_out.sign()[:, None], largest)


def _tokens(vit: ViT, images: Images, layer: int, norm: bool) -> Iterator[Tokens]:
    if isinstance(images, (str, bytes)):
        raise InputError(f"images {images!r} is a text; open files with regard.datasets.open_image")
    if isinstance(images, Tensor) and images.dim() == 4:
        yield vit.intermediates(images, layer, norm=norm)[0]
    elif isinstance(images, (Tensor, np.ndarray)) or not isinstance(images, Iterable):
        pixels = vit.preprocess(images).to(vit.tokenizer.proj.weight)
        yield vit.intermediates(pixels, layer, norm=norm)[0]
    else:
        for image in images:
            yield from _tokens(vit, image, layer, norm)


def _wanted(masks: list[Tensor], grid: tuple[int, int]) -> Tensor:
    """The next image's patches to fit on, bool `(N,)`."""
    if not masks:
        raise InputError("there are more images than masks; give one for each image")
    mask = torch.as_tensor(masks.pop(0)).cpu()
    if tuple(mask.shape) != grid or mask.dtype != torch.bool:
        raise InputError(f"a mask is {mask.dtype} {tuple(mask.shape)}; it must be bool over the {grid} patches")
    return mask.flatten()
