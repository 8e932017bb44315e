"""Relevance between words and patches, against matrices that are all held."""

import pytest
import torch

from regard.vit.maps.corelevance import Cross, Patches, Words, co_attention, encoder_decoder
from regard.vit.maps.streamed import Dense, Streamed

BATCH, T, N = 2, 4, 300  # more patches than one block of rows holds


def normed(matrix: torch.Tensor) -> torch.Tensor:
    """Eq. 8 and 9 with a division that is safe."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    rest = matrix - eye
    total = rest.sum(-1, keepdim=True)
    return torch.nan_to_num(rest / total, nan=0.0) + eye


def by_hand(steps, like):
    """Equations 6 to 11 as they are printed, with every matrix whole."""
    batch, words, patches = like.shape
    r_tt = torch.eye(words, dtype=like.dtype).repeat(batch, 1, 1)
    r_ii = torch.eye(patches, dtype=like.dtype).repeat(batch, 1, 1)
    r_ti, r_it = torch.zeros_like(like), torch.zeros_like(like).mT
    for kind, *a in steps:
        if kind == "words":
            r_tt, r_ti = r_tt + a[0] @ r_tt, r_ti + a[0] @ r_ti
        elif kind == "patches":
            r_ii, r_it = r_ii + a[0] @ r_ii, r_it + a[0] @ r_it
        else:
            ti, it = a
            old = r_tt, r_ti, r_it, r_ii
            if ti is not None:
                r_ti = old[1] + normed(old[0]).mT @ ti @ normed(old[3])
                r_tt = old[0] + ti @ old[2]
            if it is not None:
                r_it = old[2] + normed(old[3]).mT @ it @ normed(old[0])
                r_ii = old[3] + it @ old[1]
    return r_tt, r_ti


def positive(*shape: int, share: float = 0.5) -> torch.Tensor:
    """Like mean_h((dA * A)^+): many zeros, small numbers."""
    noise = torch.randn(BATCH, *shape, dtype=torch.float64)
    return (noise - noise.quantile(1 - share)).clamp_min(0) / shape[-1]


def streamed(matrix: torch.Tensor) -> Streamed:
    return Streamed(lambda index: matrix[:, index], tuple(matrix.shape))


def given(steps):
    """The same steps as the product takes them."""
    kinds = {"words": Words, "patches": lambda a: Patches(streamed(a)), "cross": Cross}
    return [kinds[kind](*a) for kind, *a in steps]


ORDERS = {
    "one after another": "wwppxwpxwp",
    "a last layer for words alone": "wpxwptw",
    "patches read first": "pixwp",
    "nothing but crossing": "xxx",
}


def model_of(order: str):
    make = {
        "w": lambda: ("words", positive(T, T)),
        "p": lambda: ("patches", positive(N, N)),
        "x": lambda: ("cross", positive(T, N), positive(N, T)),
        "t": lambda: ("cross", positive(T, N), None),
        "i": lambda: ("cross", None, positive(N, T)),
    }
    return [make[letter]() for letter in order]


LIKE = torch.zeros(BATCH, T, N, dtype=torch.float64)


@pytest.mark.parametrize("order", ORDERS)
def test_co_attention_equals_the_printed_equations(order):
    steps = model_of(ORDERS[order])
    for got, want in zip(co_attention(given(steps), LIKE), by_hand(steps, LIKE), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        assert want.amax() > 1e-3


@pytest.mark.parametrize("asks", ["111", "101", "010"])
def test_encoder_and_decoder_equal_the_printed_equations(asks):
    encoder = [positive(N, N) for _ in range(3)]
    decoder = [(positive(T, T), positive(T, N) if ask == "1" else None) for ask in asks]
    steps = [("patches", a) for a in encoder]
    for own, cross in decoder:
        steps += [("words", own)] + ([] if cross is None else [("cross", cross, None)])
    got = encoder_decoder([streamed(a) for a in encoder], decoder)
    for mine, want, also in zip(got, by_hand(steps, LIKE), co_attention(given(steps), LIKE), strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-6)
        torch.testing.assert_close(mine, also, rtol=0, atol=1e-9)


def test_every_item_of_a_batch_gets_its_own():
    steps = model_of("wpxwpx")
    both = co_attention(given(steps), LIKE)
    for item in range(BATCH):
        one = [(kind, *(None if x is None else x[item : item + 1] for x in a)) for kind, *a in steps]
        for whole, single in zip(both, co_attention(given(one), LIKE[:1]), strict=True):
            torch.testing.assert_close(whole[item : item + 1], single, rtol=0, atol=1e-12)


def test_without_any_gradient_every_word_is_relevant_to_itself_alone():
    steps = [(kind, *(torch.zeros_like(x) for x in a)) for kind, *a in model_of("wpxwpx")]
    tt, ti = co_attention(given(steps), LIKE)
    assert torch.equal(tt, torch.eye(T, dtype=tt.dtype).expand_as(tt))
    assert not ti.any()


@pytest.mark.parametrize("silent", ["words", "patches", "cross"])
def test_a_modality_that_is_untouched_gives_no_nan(silent):
    steps = [(kind, *(x * (kind != silent) for x in a)) for kind, *a in model_of("wpxwpxw")]
    got = co_attention(given(steps), LIKE)
    for mine, want in zip(got, by_hand(steps, LIKE), strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-6)


def test_a_relevance_that_is_tiny_is_not_rounded_away():
    """In single precision a gradient of 1e-9 is lost beside the 1 of I, but its share of a row of R - I is not."""
    words, patches, cross = (x.float() * 1e-9 for x in (positive(T, T, share=1.0), positive(N, N), positive(T, N)))
    _, ti = co_attention([Words(words), Patches(streamed(patches)), Cross(cross)], LIKE.float())
    shares = [
        a.double() / a.double().sum(-1, keepdim=True) + torch.eye(a.shape[-1], dtype=torch.float64)
        for a in (words, patches)
    ]
    want = shares[0].mT @ cross.double() @ shares[1]
    torch.testing.assert_close(ti.double(), want, rtol=1e-5, atol=0)


def test_no_more_than_a_block_of_rows_is_asked_for():
    matrix, sizes = positive(N, N), []
    operator = Streamed(lambda index: sizes.append(len(index)) or matrix[:, index], tuple(matrix.shape))
    encoder_decoder([operator, operator], [(positive(T, T), positive(T, N, share=1.0))])
    assert max(sizes) == 256
    assert len(sizes) == 2 * 4


def test_a_streamed_matrix_multiplies_as_the_matrix_does():
    matrix = positive(N, N)
    v, w = torch.randn(BATCH, 3, N).double(), torch.randn(BATCH, N, 5).double()
    v[:, :, ::2] = 0
    for operator in (streamed(matrix), Dense(matrix)):
        torch.testing.assert_close(operator.left(v), v @ matrix)
        torch.testing.assert_close(operator.right(w), matrix @ w)
    made = []
    Streamed(lambda index: made.append(len(index)) or matrix[:, index], tuple(matrix.shape)).left(v)
    assert sum(made) == N // 2  # rows that meet only zeros are not made


def test_a_decoder_that_never_asks_is_refused():
    with pytest.raises(ValueError, match="no layer of the decoder asks"):
        encoder_decoder([], [(positive(T, T), None)])
