"""BLIP's ranking of candidates against a plain re-computation in float64 with transformers' layers.

As published: one step on [DEC] gives each candidate the probability of its first token; the k best are read to their
end. The authors' score keeps the label smoothing of their loss; ours is the log-probability itself.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.crossattn import ImageQA
from regard.crossattn.rank import rank

CANDIDATES = ["yes", "no", "red", "red dog", "red dogs", "two", "two dogs", "old house", "1", "no dog on the left"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def blip(request, make_blip) -> Any:
    return make_blip(tied=request.param)


@pytest.fixture(scope="module")
def qa(blip, save, tmp_path_factory) -> ImageQA:
    return ImageQA.from_pretrained(save(blip, tmp_path_factory.mktemp("blip") / "one"))


@pytest.fixture(scope="module")
def asked(blip, qa, images_of) -> dict[str, Any]:
    """Four questions of unequal length on four images: our states and masks, and theirs in float64, each alone."""
    exact = copy.deepcopy(blip).double()
    # The authors' eps, which transformers' file does not state.
    for module in exact.vision_model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    images = images_of(11, 4)
    questions = ["what color is it?", "is the dog on the left?", "who?", "how many large trees are near the old house"]
    encoded = qa.tokenizer(questions, 48)
    states = []
    with torch.no_grad():
        ours = qa.read(qa.remember(images), encoded.ids, encoded.mask)
        for row, length in enumerate(encoded.mask.sum(dim=1).tolist()):
            seen = exact.vision_model(images[row : row + 1].double()).last_hidden_state
            ids = encoded.ids[row : row + 1, :length]
            states.append(exact.text_encoder(ids, encoder_hidden_states=seen).last_hidden_state)
    return {"decoder": exact.text_decoder, "states": states, "ours": ours, "mask": encoded.mask}


def logits(asked: dict[str, Any], question: int, ids: tuple[int, ...], qa: ImageQA) -> tuple[Tensor, Tensor]:
    """Scores `(t, V)` in float64 after each token, and the token that follows."""
    config = qa.decoder.config
    whole = torch.tensor([[config.first, *ids, config.last]])
    with torch.no_grad():
        found = asked["decoder"](whole[:, :-1], encoder_hidden_states=asked["states"][question]).logits[0]
    assert found.dtype == torch.float64
    return found, whole[0, 1:]


def exact_logs(asked: dict[str, Any], qa: ImageQA, smoothing: float = 0.0) -> Tensor:
    """Minus the sum of the cross-entropies of each candidate's tokens and its end, `(Q, C)`."""
    rows = []
    for question in range(4):
        losses = [
            torch.nn.functional.cross_entropy(scores, ids, reduction="sum", label_smoothing=smoothing)
            for scores, ids in (logits(asked, question, ids, qa) for ids in qa.tokenizer.answers(CANDIDATES))
        ]
        rows.append(-torch.stack(losses))
    return torch.stack(rows)


@torch.no_grad()
def ours(asked: dict[str, Any], qa: ImageQA, **options: Any) -> Tensor:
    decoder = qa.decoder
    kept = decoder.remember(asked["ours"])
    return rank(decoder, kept, qa.readable(asked["mask"]), qa.tokenizer.answers(CANDIDATES), **options)


def test_every_candidate_has_its_exact_log_probability(asked, qa):
    expected = exact_logs(asked, qa)
    assert expected.std() > 2
    torch.testing.assert_close(ours(asked, qa).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_shortlist_holds_those_with_the_likeliest_first_tokens(asked, qa, k):
    tokens = qa.tokenizer.answers(CANDIDATES)
    found = ours(asked, qa, shortlist=k)
    expected = exact_logs(asked, qa)
    for question in range(4):
        first = logits(asked, question, (), qa)[0][0].softmax(dim=-1)
        # Candidates that share their first token come in the order of their tokens.
        order = sorted(range(len(tokens)), key=lambda i, first=first: (-first[tokens[i][0]].item(), tokens[i]))
        listed = sorted(order[:k])
        assert found[question].isfinite().nonzero().flatten().tolist() == listed
        torch.testing.assert_close(found[question, listed].double(), expected[question, listed], atol=1e-4, rtol=1e-5)


def test_the_authors_smoothed_scores_follow_from_the_same_decoder(asked, qa):
    """Their score is 0.9 of the log-probability and 0.1 of the mean over the vocabulary, summed over the tokens."""
    expected = exact_logs(asked, qa, smoothing=0.1)
    decoder, rows = qa.decoder, []
    with torch.no_grad():
        kept = decoder.remember(asked["ours"])
        for ids in qa.tokenizer.answers(CANDIDATES):
            whole = torch.tensor([[decoder.config.first, *ids, decoder.config.last]]).expand(4, -1)
            logs = decoder.logits(decoder(whole[:, :-1], kept, asked["mask"])).log_softmax(dim=-1)
            of_token = logs.gather(2, whole[:, 1:, None])[..., 0]
            rows.append((0.9 * of_token + 0.1 * logs.mean(dim=-1)).sum(dim=1))
    torch.testing.assert_close(torch.stack(rows, dim=1).double(), expected, atol=2e-4, rtol=1e-5)


def test_ask_ranks_by_these_numbers(qa, asked, images_of):
    expected = exact_logs(asked, qa)
    memory = qa.look(images_of(11, 4))
    question = ["what color is it?", "is the dog on the left?", "who?", "how many large trees are near the old house"]
    for row, answer in zip(expected, qa.ask(memory, question, candidates=CANDIDATES, top=10), strict=True):
        best = row.argsort(descending=True).tolist()
        assert [text for text, _ in answer.top] == [CANDIDATES[i] for i in best]
        torch.testing.assert_close(torch.tensor(answer.logs).double(), row[best], atol=1e-4, rtol=1e-5)
        shares = torch.tensor([share for _, share in answer.top]).double()
        torch.testing.assert_close(shares, row.softmax(dim=-1)[best], atol=1e-5, rtol=0)
