"""Numbers that tell whether self-distillation lives, and words when it does not.

A teacher collapses in two ways. It may say the same, uniform thing of every picture: the loss stays at ln K. Or it may
be certain of one prototype: its entropy falls to 0. Both look like a quiet training, and both end in features that are
worth nothing. K prototypes, B images, D features.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.train.distill.loss import wide

PINNED = 1e-3  # how near loss / ln K is to 1 in a uniform collapse
CERTAIN = 0.01  # share of ln K below which the entropy of single answers is a collapse
ALIKE = 0.02  # share of ln K below which the entropy of their mean is one
_TINY = 1e-30


def entropy(q: Tensor) -> Tensor:
    """`-sum_k q log q` of rows of probabilities: `(…, K) -> (…)`, in nats."""
    return -(q * q.clamp_min(_TINY).log()).sum(dim=-1)


def rank_me(features: Tensor) -> Tensor:
    """The effective rank of `features (B, D)`: exp of the entropy of its singular values (Garrido et al., 2023,
    arXiv:2210.02885).
    """
    values = torch.linalg.svdvals(wide(features).nan_to_num())  # what is not finite is told of elsewhere
    return entropy(values / values.sum().clamp_min(_TINY)).exp()


def feature_spread(features: Tensor) -> Tensor:
    """Standard deviation of L2-normalised `features (B, D)` over the batch, mean over channels, times sqrt(D).

    1 for features that point everywhere, 0 for features that are all the same.
    """
    x = F.normalize(wide(features), dim=-1)
    return x.std(dim=0, correction=0).mean() * math.sqrt(x.shape[1])


@torch.no_grad()
def measures(q: Tensor, loss: Tensor, features: Tensor, centre: Tensor | None) -> dict[str, Tensor]:
    """What is logged, from the teacher's answers `q (2, B, K)`, the loss () and teacher features `(B, D)`."""
    top = math.log(q.shape[-1])
    each = entropy(q).mean()
    out = {
        "loss_share": loss / top,  # of ln K
        "entropy_of_mean": entropy(q.flatten(0, -2).mean(dim=0)) / top,
        "mean_entropy": each / top,
        "kl": loss - each,
        "feature_std": feature_spread(features),
        "rank_me": rank_me(features),
    }
    return out if centre is None else {**out, "centre_norm": centre.norm()}


class CollapseWatch(nn.Module):
    """Speaks, once of each, of a collapse. Counts on the device; looks when asked.

    `patience` is how many batches the loss has to stay within 0.1 % of ln K.
    """

    pinned: Tensor

    def __init__(self, prototypes: int, patience: int = 500):
        super().__init__()
        self.top, self.patience = math.log(prototypes), patience
        self.register_buffer("pinned", torch.zeros(()))
        self._said: set[str] = set()

    @torch.no_grad()
    def count(self, loss: Tensor) -> None:
        """Take note of one batch's loss ()."""
        near = (loss / self.top - 1.0).abs() <= PINNED
        self.pinned.copy_((self.pinned + 1) * near)

    def speak(self, measured: dict[str, Tensor]) -> list[str]:
        """Print and return what there is to warn of; reads the device."""
        found = {}
        if float(self.pinned) >= self.patience:
            found["uniform"] = (
                f"the loss has been ln K = {self.top:.4f} for {int(self.pinned)} batches: the teacher says the same of "
                "every picture (uniform collapse). Lower tau_teacher, take fewer prototypes, or lower the momentum"
            )
        if (share := float(measured["mean_entropy"])) < CERTAIN:
            found["certain"] = (
                f"the teacher is certain of one prototype for each picture: its entropy is {share:.2%} of ln K "
                "(one-hot collapse). Raise tau_teacher, warm it up for longer, or freeze the last layer for longer"
            )
        if (share := float(measured["entropy_of_mean"])) < ALIKE:
            found["alike"] = (
                f"the teacher answers with the same few prototypes for all pictures: the entropy of its mean is "
                f"{share:.2%} of ln K. Lower centre_momentum, or use sinkhorn"
            )
        new = {kind: text for kind, text in found.items() if kind not in self._said}
        self._said |= new.keys()
        for text in new.values():
            print(f"warning: {text}", file=sys.stderr, flush=True)
        return list(new.values())
