"""Muon for the matrices inside the blocks, AdamW for everything else, as one optimizer.

Two optimizers would force Lightning's manual optimization, in which `global_step` counts each of them and no
checkpoint is written by step (Lightning #13752, #17958). So one object steps both: their groups stand in one list,
which a learning rate schedule sees, and their state in one dict, which a checkpoint holds.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from regard.vit.errors import InputError


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` (Jordan, 2024, kellerjordan.github.io/posts/muon) on some matrices, AdamW on the rest.

    Args:
        groups: parameter groups as AdamW takes them; a group's `factor`, if any, scales both learning rates.
        hidden: the matrices that Muon takes out of them: hidden weights of two dimensions, no embeddings and no heads.
        muon_lr: learning rate of these, with Muon's own scaling by shape.
        lr, betas, fused: of AdamW.

    Raises InputError where torch has no Muon, which came with 2.9.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        hidden: Collection[Tensor],
        muon_lr: float,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        fused: bool | None = None,
    ):
        if not hasattr(torch.optim, "Muon"):
            raise InputError(
                f"optimizer muon needs torch 2.9 or later, this is {torch.__version__}; update torch, or choose adamw"
            )
        chosen = set(hidden)
        matrices = [_part(group, lambda p: p in chosen, "muon ", muon_lr) for group in groups]
        rest = [_part(group, lambda p: p not in chosen, "", lr) for group in groups]
        matrices, rest = ([group for group in some if group["params"]] for some in (matrices, rest))
        if not matrices:
            raise InputError("optimizer muon found no trainable matrix inside the blocks; choose adamw")
        self._muon = torch.optim.Muon(matrices, lr=muon_lr)
        # Every model has a vector somewhere, but torch refuses an empty list.
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, fused=fused) if rest else None
        super().__init__([*self._muon.param_groups, *(self._adamw.param_groups if self._adamw else [])], {})
        self._share()

    def _share(self) -> None:
        """Let both work on the groups and the state of this one."""
        count = len(self._muon.param_groups)
        self._muon.param_groups, self._muon.state = self.param_groups[:count], self.state
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = self.param_groups[count:], self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; `closure` is evaluated once, before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        if self._adamw is not None:
            self._adamw.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def _part(group: dict[str, Any], wanted: Callable[[Tensor], bool], prefix: str, lr: float) -> dict[str, Any]:
    params = [parameter for parameter in group["params"] if wanted(parameter)]
    name = prefix + str(group.get("name", ""))
    return {**group, "name": name.strip(), "params": params, "lr": lr * group.get("factor", 1.0)}


def hidden_matrices(blocks: nn.Module) -> list[Tensor]:
    """The weights of all linear layers inside the blocks of a transformer."""
    return [part.weight for part in blocks.modules() if isinstance(part, nn.Linear)]
