"""The lecture on the blackboard: the numbers the ideas of this house come from, computed by its own code."""

import pytest
import torch
from torch import Tensor, nn

from regard.vit import Attention, ViT, ViTConfig, look_up

N, D, HEADS, D_K = 5, 6, 2, 3  # the lecture's shape table


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attention(dim: int = D, heads: int = HEADS, **options: object) -> Attention:
    attn = Attention(dim, heads, **options).double()
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attn


def tokens(count: int = N, dim: int = D) -> Tensor:
    return torch.randn(1, count, dim, dtype=torch.float64)


# soft dictionary look-up ---------------------------------------------------------------------------------------------


def test_orange_is_mostly_a_lemon():
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # apple, banana, lemon
    values = torch.tensor([[1.0, 0, 0, 5], [0, 1, 0, 6], [0, 0, 1, 7]])  # pomme, banane, citron
    orange = torch.log(torch.tensor([[8.0, 8.0]]))
    mixed, percentages = look_up(orange, keys, values, scale=1.0)
    torch.testing.assert_close(percentages, torch.tensor([[0.1, 0.1, 0.8]]))
    torch.testing.assert_close(mixed, torch.tensor([[0.1, 0.1, 0.8, 0.5 + 0.6 + 5.6]]))


def test_look_up_divides_by_the_root_of_the_key_width():
    q, k, v = torch.randn(4, 9), torch.randn(5, 9), torch.randn(5, 2)
    mixed, weights = look_up(q, k, v)
    torch.testing.assert_close(weights, torch.softmax(q @ k.T / 3, dim=-1))
    torch.testing.assert_close(mixed, weights @ v)


# attention -----------------------------------------------------------------------------------------------------------


def test_every_shape_of_the_lecture_s_table():
    attn, x = attention(), tokens()
    assert x[0].shape == (5, 6)
    for project in (attn.to_q, attn.to_k, attn.to_v):
        per_head = project.weight.T.unflatten(1, (HEADS, D_K))
        assert per_head[:, 0].shape == per_head[:, 1].shape == (6, 3)
    q, kv = attn.project(x)
    assert q[0, 0].shape == kv.k[0, 1].shape == kv.v[0, 0].shape == (5, 3)
    rows = attn.weights(q, kv.k)
    assert rows[0, 0].shape == (5, 5)
    z = attn.mix(q, kv)
    assert z[0, 1].shape == (5, 3)
    assert z.transpose(1, 2).flatten(2)[0].shape == (5, 6)
    assert attn.out.weight.shape == (6, 6)
    assert attn.answer(q, kv)[0].shape == attn(x)[0].shape == (5, 6)


def test_heads_of_another_total_width_come_back_to_the_word_space():
    attn = attention(D, 4, head_dim=5)  # H d_k = 20 is no d
    assert attn.out.weight.shape == (6, 20)
    assert attn(tokens()).shape == (1, 5, 6)


def test_the_same_three_matrices_serve_every_token():
    attn, x = attention(), tokens()
    q, kv = attn.project(x)
    for i in range(N):
        q_i, kv_i = attn.project(x[:, i : i + 1])
        torch.testing.assert_close(q[:, :, i : i + 1], q_i)
        torch.testing.assert_close(kv.k[:, :, i : i + 1], kv_i.k)
        torch.testing.assert_close(kv.v[:, :, i : i + 1], kv_i.v)


def test_a_is_softmax_of_scaled_scores_and_its_rows_sum_to_one():
    attn, x = attention(), tokens()
    q, kv = attn.project(x)
    rows = attn.weights(q, kv.k)[0]
    torch.testing.assert_close(rows.sum(-1), torch.ones(HEADS, N, dtype=torch.float64))
    for h in range(HEADS):
        for i in range(N):  # row i is query i
            scores = torch.stack([q[0, h, i] @ kv.k[0, h, j] for j in range(N)]) / D_K**0.5
            torch.testing.assert_close(rows[h, i], scores.exp() / scores.exp().sum())


def test_z_needs_no_other_z():
    attn, x = attention(), tokens()
    torch.testing.assert_close(attn(x[:, 3:4], x), attn(x)[:, 3:4])


def test_attention_equals_the_lecture_s_sums():
    """Loops over heads and rows: q = x W_q, A = softmax(q K^T / sqrt(d_k)), Z = A V, O = Z_concat W_o."""
    attn, x = attention(), tokens()
    out = torch.zeros(N, D, dtype=torch.float64)
    for i in range(N):
        z = []
        for h in range(HEADS):
            part = slice(h * D_K, (h + 1) * D_K)
            q = attn.to_q.weight[part] @ x[0, i] + attn.to_q.bias[part]
            scores = [q @ (attn.to_k.weight[part] @ x[0, j] + attn.to_k.bias[part]) / D_K**0.5 for j in range(N)]
            total = sum(s.exp() for s in scores)
            z.append(sum(s.exp() / total * (attn.to_v.weight[part] @ x[0, j] + attn.to_v.bias[part])
                         for j, s in enumerate(scores)))  # fmt: skip
        out[i] = attn.out.weight @ torch.cat(z) + attn.out.bias
    torch.testing.assert_close(attn(x)[0], out, rtol=1e-12, atol=1e-12)


# why 1/sqrt(d_k) -----------------------------------------------------------------------------------------------------


def scores_of(values: list[float], width: int) -> tuple[Tensor, Tensor]:
    """A query and keys of `width` whose dot products are `values`."""
    query = torch.ones(1, width, dtype=torch.float64)
    keys = torch.tensor(values, dtype=torch.float64)[:, None].expand(-1, width) / width
    return query, keys


def test_small_scores_mix_and_large_ones_saturate():
    values = torch.eye(4, dtype=torch.float64)
    _, mixed = look_up(*scores_of([1, 2, 3, 4], 100), values, scale=1.0)
    assert [round(p, 2) for p in mixed[0].tolist()] == [0.03, 0.09, 0.24, 0.64]
    query, keys = scores_of([10, 20, 30, 40], 100)
    _, saturated = look_up(query, keys, values, scale=1.0)
    assert [round(p, 2) for p in saturated[0].tolist()] == [0, 0, 0, 1]
    _, scaled = look_up(query, keys, values)  # 1/sqrt(100) brings them back to 1, 2, 3, 4
    torch.testing.assert_close(scaled, mixed)


def test_saturated_softmax_has_vanishing_gradients():
    values = torch.randn(4, 3, dtype=torch.float64)
    query, keys = scores_of([10, 20, 30, 40], 100)
    size = {}
    for scale in (1.0, None):
        q, k = query.clone().requires_grad_(), keys.clone().requires_grad_()
        look_up(q, k, values, scale)[0].sum().backward()
        size[scale] = max(q.grad.abs().max().item(), k.grad.abs().max().item())
    assert size[1.0] < 1e-2 * size[None]
    assert size[1.0] < 1e-3


def test_our_attention_scales_so_that_wide_heads_do_not_saturate():
    wide = Attention(512, 1)
    for projection in (wide.to_q, wide.to_k):
        nn.init.eye_(projection.weight)
        nn.init.zeros_(projection.bias)
    x = torch.randn(1, 64, 512)
    q, kv = wide.project(torch.randn(1, 64, 512), x)  # unit variance: dot products have deviation sqrt(512)
    ours = wide.weights(q, kv.k)[0, 0].amax(-1).mean()
    unscaled = torch.softmax(q @ kv.k.transpose(-2, -1), dim=-1)[0, 0].amax(-1).mean()
    assert ours < 0.25
    assert unscaled > 0.8


# causal mask ---------------------------------------------------------------------------------------------------------


def test_z_i_mixes_v_1_to_v_i_only():
    attn, x = attention(), tokens()
    before = attn(x, causal=True)
    for i in range(N):
        changed = x.clone()
        changed[:, i + 1 :] = torch.randn_like(changed[:, i + 1 :])
        assert torch.equal(attn(changed, causal=True)[:, : i + 1], before[:, : i + 1])
    q, kv = attn.project(x)
    rows = attn.weights(q, kv.k, attn.join_masks(None, True, q, kv.k))[0]
    assert (rows.triu(1) == 0).all()
    assert (rows.tril() > 0).sum() == HEADS * N * (N + 1) // 2


def test_later_tokens_get_no_gradient_from_earlier_rows():
    attn = attention()
    for i in range(N):
        x = tokens().requires_grad_()
        attn(x, causal=True)[:, i].sum().backward()
        assert (x.grad[:, i + 1 :] == 0).all()
        assert (x.grad[:, : i + 1] != 0).any(-1).all()


def test_without_a_mask_z_3_peeks_at_x_4():
    attn, x = attention(), tokens()
    changed = x.clone()
    changed[:, 3] += 1.0
    assert not torch.allclose(attn(changed)[:, 2], attn(x)[:, 2])
    assert torch.equal(attn(changed, causal=True)[:, 2], attn(x, causal=True)[:, 2])


# order ---------------------------------------------------------------------------------------------------------------


def test_attention_alone_ignores_order():
    attn, x = attention(), tokens()
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(attn(x[:, order]), attn(x)[:, order])


@pytest.mark.parametrize("positions", ["none", "learned", "sincos", "rope"])
def test_a_vit_knows_where_a_patch_lies_only_by_its_positions(positions):
    config = ViTConfig(
        image_size=(8, 12), patch_size=4, dim=16, depth=2, heads=2, registers=1, positions=positions, pooling="cls"
    )
    vit = ViT(config).double()
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.4)
    image = torch.randn(1, 3, 8, 12, dtype=torch.float64)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    cells = image.unflatten(3, (3, 4)).unflatten(2, (2, 4)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order]
    shuffled = cells.unflatten(1, (2, 3)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    a, b = vit(image), vit(shuffled)
    blind = torch.allclose(b.patches, a.patches[:, order]) and torch.allclose(a.cls, b.cls)
    assert blind == (positions == "none")


# the field's own attention -------------------------------------------------------------------------------------------


def torch_twin(attn: Attention, dim: int, context_dim: int) -> nn.MultiheadAttention:
    twin = nn.MultiheadAttention(dim, attn.heads, kdim=context_dim, vdim=context_dim, batch_first=True).double()
    weights = (attn.to_q.weight, attn.to_k.weight, attn.to_v.weight)
    with torch.no_grad():
        if twin.in_proj_weight is not None:
            twin.in_proj_weight.copy_(torch.cat(weights))
        else:
            twin.q_proj_weight.copy_(weights[0])
            twin.k_proj_weight.copy_(weights[1])
            twin.v_proj_weight.copy_(weights[2])
        twin.in_proj_bias.copy_(torch.cat((attn.to_q.bias, attn.to_k.bias, attn.to_v.bias)))
        twin.out_proj.weight.copy_(attn.out.weight)
        twin.out_proj.bias.copy_(attn.out.bias)
    return twin


@pytest.mark.parametrize("masked", ["no mask", "bool", "float", "per head"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_equals_torch_s_multihead_attention(cross, masked):
    context_dim, count = (10, 7) if cross else (D, N)
    attn = attention(context_dim=context_dim)
    twin = torch_twin(attn, D, context_dim)
    x = torch.randn(3, N, D, dtype=torch.float64)
    context = torch.randn(3, count, context_dim, dtype=torch.float64) if cross else x
    mask = theirs = None
    if masked == "bool":
        mask = torch.rand(N, count) < 0.6
        mask[:, 0] = True
        theirs = ~mask  # torch's True forbids
    elif masked == "float":
        mask = theirs = torch.randn(N, count, dtype=torch.float64)
    elif masked == "per head":
        mask = torch.rand(3, HEADS, N, count) < 0.6
        mask[..., 0] = True
        theirs = ~mask.flatten(0, 1)
    out, rows = twin(x, context, context, attn_mask=theirs, average_attn_weights=False)
    torch.testing.assert_close(attn(x, context, mask=mask), out, rtol=1e-12, atol=1e-12)
    q, kv = attn.project(x, context)
    ours = attn.weights(q, kv.k, attn.join_masks(mask, False, q, kv.k))
    torch.testing.assert_close(ours, rows, rtol=1e-12, atol=1e-12)


def test_causal_equals_torch_s_square_mask():
    attn = attention()
    x = torch.randn(3, N, D, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(N).double()
    out, _ = torch_twin(attn, D, D)(x, x, x, attn_mask=mask)
    torch.testing.assert_close(attn(x, causal=True), out, rtol=1e-12, atol=1e-12)
