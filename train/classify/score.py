"""What is counted when a classifier is scored: sums over all pictures of all ranks, each picture once."""

import torch
from torch import Tensor
from torchmetrics import Metric


class Share(Metric):
    """The mean of a number per picture over those that count, whatever batches and ranks they came in.

    torchmetrics' own MeanMetric either asks the device at every update whether a value is NaN, or forgets the weights.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, values: Tensor, counts: Tensor) -> None:
        """Add `values (B,)` where `counts (B,)` is True."""
        self.total += torch.where(counts, values.float(), 0.0).sum()
        self.count += counts.sum()

    def compute(self) -> Tensor:
        return self.total / self.count


def rightly(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the first, second … best class is the right one: bool `(B, min(5, C))`."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
