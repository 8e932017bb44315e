"""PCA maps against a dense decomposition, and their promises: one sign, one basis for many pictures."""

import numpy as np
import pytest
import torch

from regard.vit.errors import InputError
from regard.vit.maps.pca import PatchBasis, fit_basis, pca_colours, pca_maps

SIZE = (48, 64)  # grid 6 x 8


def border_minus_inside(values: torch.Tensor) -> torch.Tensor:
    edge = torch.ones(values.shape[:2], dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    return values[edge].mean(0) - values[~edge].mean(0)


def test_components_are_those_of_a_dense_decomposition(vit):
    model, images = vit(registers=2), torch.randn(3, 3, *SIZE)
    basis = fit_basis(model, images, 1)
    features = model.intermediates(images, 1, norm=True)[0].patches.double().flatten(0, 1).detach()
    _, s, vh = torch.linalg.svd(features - features.mean(0), full_matrices=False)
    assert basis.patches == len(features) == 3 * 48
    torch.testing.assert_close((basis.components @ vh[:3].T).abs(), torch.eye(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(basis.spread, s[:3] / len(features) ** 0.5)
    torch.testing.assert_close(basis.share, s[:3] ** 2 / (s**2).sum())
    coordinates = torch.cat([m.flatten(0, 1) for m in pca_maps(model, images, basis)])
    torch.testing.assert_close(coordinates.mean(0), torch.zeros(3).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(coordinates.std(0, correction=0), torch.ones(3).double())


def test_the_border_is_on_the_negative_side_whatever_the_signs_of_the_solver(vit, monkeypatch):
    model, images = vit(), torch.randn(2, 3, *SIZE)
    basis = fit_basis(model, images)
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (lambda r: (r[0], -r[1]))(eigh(m)))
    turned = fit_basis(model, images)
    assert torch.equal(basis.components, turned.components)
    far = torch.stack(list(pca_maps(model, images, basis)))
    assert (border_minus_inside(far.permute(1, 2, 0, 3)).mean(0) < 0).all()


def test_a_grid_without_an_inside_has_a_sign_too(vit, monkeypatch):
    model, images = vit(), torch.randn(2, 3, 16, 64)
    basis = fit_basis(model, images)
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: (lambda r: (r[0], -r[1]))(eigh(m)))
    assert torch.equal(basis.components, fit_basis(model, images).components)
    largest = basis.components.gather(1, basis.components.abs().argmax(1, keepdim=True))
    assert (largest > 0).all()


def test_pictures_of_several_sizes_are_fitted_jointly_and_one_by_one(vit):
    """A video's frames come from an iterator, one at a time; the basis is that of all of them."""
    model = vit()
    frames = [torch.randn(1, 3, 48, 64), torch.randn(1, 3, 40, 24)]
    seen = []

    def video():
        for frame in frames:
            seen.append(len(seen))
            yield frame

    basis = fit_basis(model, video())
    both = torch.cat([model(f).patches[0] for f in frames]).double().detach()
    torch.testing.assert_close(basis.mean, both.mean(0))
    maps = pca_maps(model, video(), basis)
    seen.clear()
    assert next(maps).shape == (6, 8, 3)
    assert seen == [0]
    assert next(maps).shape == (5, 3, 3)


def test_the_same_frame_has_the_same_colours_in_any_company(vit):
    model = vit()
    frames = torch.randn(3, 3, *SIZE)
    basis = fit_basis(model, frames)
    together = list(pca_maps(model, frames, basis))[1]
    alone = next(pca_maps(model, frames[1:2], basis))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    colours = pca_colours(together)
    assert 0 < colours.min() < 0.5 < colours.max() < 1


def test_only_what_lies_under_the_masks_is_fitted(vit):
    model, images = vit(), torch.randn(1, 3, *SIZE)
    mask = torch.zeros(6, 8, dtype=torch.bool)
    mask[1:5, 2:7] = True
    basis = fit_basis(model, images, masks=[mask])
    inside = model(images).patches[0].double()[mask.flatten()].detach()
    assert basis.patches == int(mask.sum())
    torch.testing.assert_close(basis.mean, inside.mean(0))
    for wrong in ([], [mask, mask], [mask.T], [mask.float()]):
        with pytest.raises(InputError, match="mask"):
            fit_basis(model, images, masks=wrong)


def test_a_saved_basis_gives_the_same_maps(vit, tmp_path):
    model, images = vit(), torch.randn(1, 3, *SIZE)
    basis = fit_basis(model, images, 0, norm=False)
    opened = PatchBasis.load(basis.save(tmp_path / "new" / "basis.npz"))
    assert (opened.layer, opened.norm, opened.patches) == (0, False, 48)
    for ours, theirs in zip(pca_maps(model, images, basis), pca_maps(model, images, opened), strict=True):
        assert torch.equal(ours, theirs)


def test_a_file_that_is_no_basis_is_told(vit, tmp_path):
    path = tmp_path / "basis.npz"
    with pytest.raises(InputError, match=r"basis.npz: no basis can be read"):
        PatchBasis.load(path)
    for content in (b"", b"not a zip", b"PK\x03\x04broken"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"basis.npz: no basis can be read"):
            PatchBasis.load(path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"array.npy"):
        PatchBasis.load(tmp_path / "array.npy")
    np.savez(path, mean=np.zeros(3))
    with pytest.raises(InputError, match=r"lacks components, spread, share, layer, norm, patches"):
        PatchBasis.load(path)
    fit_basis(vit(), torch.randn(1, 3, *SIZE)).save(path)
    good = dict(np.load(path))
    for name, value in (("mean", np.zeros(7)), ("spread", np.full(3, np.nan)), ("components", np.array(["a", "b"]))):
        np.savez(path, **{**good, name: value})
        with pytest.raises(InputError, match=rf"basis.npz: {name}"):
            PatchBasis.load(path)
    np.savez(path, mean=np.array([{}], dtype=object))
    with pytest.raises(InputError, match="no basis can be read"):
        PatchBasis.load(path)


def test_what_cannot_be_fitted_is_told(vit, tmp_path):
    model = vit()
    with pytest.raises(InputError, match="need more than 3 patches, not 2"):
        fit_basis(model, torch.randn(1, 3, 8, 16))
    with pytest.raises(InputError, match="need more than 3 patches, not 0"):
        fit_basis(model, [])
    with pytest.raises(InputError, match="33 components"):
        fit_basis(model, torch.randn(1, 3, *SIZE), components=33)
    with pytest.raises(InputError, match="layer 3 does not exist"):
        fit_basis(model, torch.randn(1, 3, *SIZE), 3)
    with pytest.raises(InputError, match="is a text"):
        fit_basis(model, "photo.jpg")
    with pytest.raises(InputError, match=r"ending in \.npz"):
        fit_basis(model, torch.randn(1, 3, *SIZE)).save(tmp_path / "basis.pt")
    with pytest.raises(InputError, match="32 wide tokens, not of 48"):
        next(pca_maps(vit(dim=48), torch.randn(1, 3, *SIZE), fit_basis(model, torch.randn(1, 3, *SIZE))))


def test_alike_patches_make_a_flat_map_and_no_nan(vit):
    model = vit(positions="none")
    images = torch.zeros(1, 3, *SIZE)
    basis = fit_basis(model, images)
    assert all(torch.equal(m, torch.zeros(6, 8, 3).double()) for m in pca_maps(model, images, basis))


def test_a_half_precision_model_is_fitted_in_float64(vit):
    model = vit().to(torch.bfloat16)
    basis = fit_basis(model, torch.randn(1, 3, *SIZE))
    assert basis.components.dtype == torch.float64
    assert torch.isfinite(next(pca_maps(model, torch.randn(1, 3, *SIZE), basis))).all()
