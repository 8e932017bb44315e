"""Losses and right answers of a batch, for every kind of head.

Q questions, T question tokens, D width, A answers of the model's list.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.crossattn import ImageQA, answering
from regard.train.questions import Batch
from regard.train.written import plain_text, written_loss


def read(model: ImageQA, batch: Batch) -> tuple[Tensor, Tensor]:
    """The questions after reading their images `(Q, T, D)`, and which of their tokens are real `(Q, T)`.

    Each picture is encoded once, however many questions it has.
    """
    memory = model.remember(model.preprocess.normalize(batch.pixels))
    states = model.read(memory, batch.ids, batch.mask, batch.of)
    return states, batch.mask.to(states.device)


def losses(model: ImageQA, states: Tensor, mask: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """The loss of each question `(Q,)`."""
    if model.decoder is None:
        return answer_loss(model.scores(states, mask), batch.targets, model.config.score)
    assert batch.written is not None
    return written_loss(model.decoder, states, model.readable(mask), batch.written, smoothing)


def right(model: ImageQA, states: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """Whether the model's answer to each question is the one most annotators gave, bool `(Q,)`.

    Its answer is the likeliest of its list, or for the head `generate` the text it writes.
    """
    if model.config.head != "generate":
        return is_right(model.scores(states, mask), batch.targets.to(states.device))
    assert model.decoder is not None
    asking = answering.Asking(top=1)
    found = answering.written(model.decoder, model.tokenizer, states, model.readable(mask), asking)
    told = [plain_text(one.texts[0]) in wanted for one, wanted in zip(found, batch.wanted, strict=True)]
    return torch.tensor(told, dtype=torch.bool, device=states.device)


def answer_loss(logits: Tensor, targets: Tensor, score: str) -> Tensor:
    """The loss of each question `(Q,)`; one whose answers are all outside the list teaches nothing."""
    if score == "softmax":
        return F.cross_entropy(logits.float(), targets, reduction="none")
    known = (targets.sum(dim=-1) > 0).float()
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(dim=-1) * known


def is_right(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether the likeliest answer is the one most annotators gave `(Q,)`; outside the list it is not."""
    chosen = targets.gather(1, logits.argmax(dim=-1, keepdim=True))[:, 0]
    return (chosen > 0) & (chosen == targets.amax(dim=-1))
