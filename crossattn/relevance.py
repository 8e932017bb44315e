"""What in the picture, and which words, speak for an answer: gradient-weighted relevance through both sides.

Chefer et al., 2021, arXiv:2103.15679: the picture is the encoder, the question the decoder that reads it.
T text tokens, N image tokens; no N x N matrix is held.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from regard.crossattn import looking
from regard.crossattn.answering import candidate_tokens
from regard.crossattn.model import ImageQA
from regard.crossattn.rank import rank
from regard.crossattn.text import TextLayer
from regard.vit.attention import Attention, KeysValues
from regard.vit.errors import InputError
from regard.vit.maps.corelevance import encoder_decoder
from regard.vit.maps.relevance import backward, forward
from regard.vit.maps.streamed import evaluating, positive_relevance
from regard.vit.maps.trace import plain
from regard.vit.model import ViT
from regard.vit.preprocess import Picture


@dataclass(frozen=True, eq=False)
class AnswerRelevance:
    """How relevant each patch and word was to an answer; no shares, but as large as the gradient is.

    Attributes:
        answer: the answer whose logit was asked about.
        logit: that logit; with a decoder the log-probability of writing the answer and ending.
        words: the words of the question as typed, W of them.
        patches: relevance of the patches to each word, `(W, grid height, grid width)`.
        answer_patches: relevance of the patches to the answer, as the pooling reads the words, `(grid height, grid
            width)`.
        answer_words: relevance of the words to the answer `(W,)`.
        special: relevance of the class token and registers to the answer `(cls + R,)`, which is on no map.
    """

    answer: str
    logit: float
    words: tuple[str, ...]
    patches: Tensor
    answer_patches: Tensor
    answer_words: Tensor
    special: Tensor


@dataclass(frozen=True, eq=False)
class _Seen:
    """An attention of the text side at work: who asked, what was offered, what each head put out."""

    attn: Attention
    q: Tensor
    kv: KeysValues
    out: Tensor

    def fused(self, grad: Tensor) -> Tensor:
        """mean_h((dA * A)^+), whole: `(1, T, N)`."""
        every = torch.arange(self.q.shape[2], device=self.q.device)
        return positive_relevance(self.attn, self.q, self.kv, grad, self.out).rows(every)


def answer_relevance(model: nn.Module, picture: Picture, question: str, answer: str | None = None) -> AnswerRelevance:
    """Why this answer: the relevance of each patch and word for its logit, from one backward; with a decoder for the
    log-probability of writing it.

    Args:
        model: an `ImageQA`, compiled or not; its parameters and their gradients are not touched.
        picture: as `ImageQA.look` takes one.
        question: one question.
        answer: one of the model's answers, or any that a decoder could write; default: the one it gives.

    Raises InputError for an answer that the model does not have, and what `look` and `ask` refuse.
    """
    qa = _plain(model)
    items = looking.prepared(picture, qa.preprocess, qa.text.words.weight)
    if len(items) != 1 or len(items[0]) != 1 or (image := items[0][0]) is None:
        raise InputError("without a picture there is no patch to be relevant; give one, by itself")
    if qa.decoder is not None and answer is None:
        answer = qa.ask(qa.look(image), question).text
    if qa.decoder is None and answer is not None and answer not in qa.config.answers:
        raise InputError(f"the model has no answer {answer!r}; it has {', '.join(qa.config.answers)}")
    encoded = qa.tokenizer([question], qa.config.text.max_tokens)
    vit = plain(qa.vit)
    with evaluating(qa), torch.inference_mode(False), torch.no_grad():
        kept, x, grid = forward(vit, image[None], 0)
        order = _context_order(vit, grid, x.device)
        with torch.enable_grad():
            x.requires_grad_()
            context = looking.numbered(vit.norm(x)[:, order], qa.image_index, 0)
            seen, states = _read(qa, encoded.ids.to(x.device), context)
            chosen, score = _score(qa, states, answer)
            outs = [each.out for pair in seen for each in pair if each is not None]
            at_image, *at_text = torch.autograd.grad(score, [x, *outs], allow_unused=True, materialize_grads=True)
        encoder = [layer.positive() for layer in backward(vit, kept, grid, at_image)][::-1]
        grads, decoder = iter(at_text), []
        for own, cross in seen:
            words = own.fused(next(grads))
            decoder.append((words, None if cross is None else _in_sequence(cross.fused(next(grads)), order)))
        tt, ti = encoder_decoder(encoder, decoder)
        ti, tt = ti[0][:, order], tt[0]
    special = vit.config.class_token + vit.config.registers
    places = [list(word.tokens) for word in encoded.words[0]]
    maps = torch.stack([ti[tokens].mean(dim=0) for tokens in places])
    read = slice(0, 1) if qa.decoder is None and qa.config.text.pooling == "first" else slice(None)
    row, over_words = ti[read].mean(dim=0), tt[read].mean(dim=0)
    return AnswerRelevance(
        chosen,
        float(score.detach()),
        tuple(word.text for word in encoded.words[0]),
        maps[:, special:].unflatten(1, grid),
        row[special:].unflatten(0, grid),
        torch.stack([over_words[tokens].sum() for tokens in places]),
        row[:special],
    )


def _score(qa: ImageQA, states: Tensor, answer: str | None) -> tuple[str, Tensor]:
    """The answer, by default the likeliest of the list, and its score `()` for what the question has read."""
    if qa.decoder is not None and answer is not None:
        tokens = candidate_tokens([answer], qa.decoder, qa.tokenizer)
        return answer, rank(qa.decoder, qa.decoder.remember(states), None, tokens)[0, 0]
    assert qa.head is not None
    logits = qa.head(qa.text.pool(states, torch.ones_like(states[..., 0], dtype=torch.bool)))[0]
    chosen = int(logits.argmax()) if answer is None else qa.config.answers.index(answer)
    return qa.config.answers[chosen], logits[chosen]


def _read(qa: ImageQA, ids: Tensor, context: Tensor) -> tuple[list[tuple[_Seen, _Seen | None]], Tensor]:
    """The text side's forward of one question `(1, T)` on one image `(1, N, D)`, showing each attention at work."""
    text = qa.text
    # The heads ask for a gradient even where every parameter is frozen.
    x = (text.words(ids.clone()) + text.positions[: ids.shape[1]]).detach().requires_grad_()
    x = text.norm(x) if text.config.norm == "post" else x
    seen: list[tuple[_Seen, _Seen | None]] = []

    def branch(attn: Attention, y: Tensor, over: Tensor, kept: list[_Seen]) -> Tensor:
        q, kv = attn.project(y, over)
        kept.append(_Seen(attn, q, kv, attn.mix(q, kv)))
        return attn.out(attn.joined(kept[-1].out, kv))

    for layer in (cast(TextLayer, layer) for layer in text.layers):
        kept: list[_Seen] = []
        x = layer.add(x, layer.norm1, lambda y: branch(layer.attn, y, y, kept))  # noqa: B023
        if layer.cross is not None:
            cross = layer.cross
            gate = 1.0 if cross.gate is None else torch.tanh(cross.gate)
            x = layer.add_looked(x, lambda y: gate * branch(cross.attn, y, context, kept))  # noqa: B023
        x = layer.add(x, layer.norm3, layer.mlp)
        seen.append((kept[0], kept[1] if len(kept) > 1 else None))
    return seen, x if text.config.norm == "post" else text.norm(x)


def _context_order(vit: ViT, grid: tuple[int, int], device: torch.device) -> Tensor:
    """The place in the ViT's sequence of each token that words read: class token, registers, patches `(N,)`."""
    count = vit.config.class_token + vit.config.registers + grid[0] * grid[1]
    places = vit.name(torch.arange(count, device=device)[None, :, None], grid)
    cls = [] if places.cls is None else [places.cls.flatten()]
    return torch.cat([*cls, places.registers.flatten(), places.patches.flatten()])


def _in_sequence(a: Tensor, order: Tensor) -> Tensor:
    """Columns from the order in which words read to the order of the ViT's sequence."""
    return torch.zeros_like(a).index_copy(2, order, a)


def _plain(model: nn.Module) -> ImageQA:
    while not isinstance(model, ImageQA):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            raise TypeError(f"the relevance of an answer is of an ImageQA, not of a {type(model).__name__}")
        model = inner
    return model
