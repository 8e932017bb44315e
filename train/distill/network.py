"""The two networks of self-distillation: a student that learns, and a teacher that is its moving average."""

import copy

import torch
from torch import Tensor, nn

from regard.train.distill.head import LAST_LAYER, ProjectionHead
from regard.vit import ViT
from regard.vit.blocks import Block, DropPath
from regard.vit.tokens import Tokens

_STD = 0.02
SUBSET_ABOVE = 0.1  # as DINOv2: below, picking the samples costs more than it saves


class Network(nn.Module):
    """A backbone with the head for its features and, for iBOT, the one for its patches.

    `patch_head` None has patches read by `head` too.
    """

    def __init__(self, backbone: ViT, head: ProjectionHead, patch_head: ProjectionHead | None = None):
        super().__init__()
        self.backbone, self.head, self.patch_head = backbone, head, patch_head

    def look(self, images: Tensor, masked: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tokens]:
        """The pooled feature of each image `(B, D)`, and its tokens; `masked` as in `ViT.forward`."""
        tokens = self.backbone(images, masked)
        return self.backbone.pool(tokens), tokens

    def last_layers(self) -> list[nn.Parameter]:
        """The weights of the heads' last layers."""
        return [parameter for name, parameter in self.named_parameters() if LAST_LAYER in name]

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """Backbone and heads by name."""
        return {name: list(part.parameters()) for name, part in self.named_children()}


def initialise_as_dino(vit: ViT) -> None:
    """Fresh weights drawn as DINO draws them: normal of 0.02 for linear layers and tokens, 0 for biases.

    The patch projection is drawn as a convolution's, uniform by its fan-in.
    """
    for part in vit.modules():
        if isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=_STD)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    vit.tokenizer.proj.reset_parameters()
    for token in (vit.cls, vit.registers, vit.positions):
        if token is not None:
            nn.init.trunc_normal_(token, std=_STD)


def make_teacher(student: Network) -> Network:
    """A network of the same weights, without gradients and in inference mode."""
    return copy.deepcopy(student).requires_grad_(False).eval()


@torch.no_grad()
def move_teacher(teacher: Network, student: Network, momentum: float) -> None:
    """`teacher <- momentum * teacher + (1 - momentum) * student`, every weight."""
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1.0 - momentum)


def set_drop_path(vit: ViT, *, subset: bool, uniform: bool) -> None:
    """Give each block the rate of the last one (`uniform`), and have high rates save the work (`subset`)."""
    for block in vit.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.drop_path, DropPath)
        if uniform:
            block.drop_path.rate = vit.config.drop_path
        block.drop_path.subset = subset and block.drop_path.rate > SUBSET_ABOVE


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """The trainable parameters as the groups `decay` and `no_decay`.

    As in DINO, all decay but biases, norms, layer scales and other vectors: class token, registers and positions do,
    and so do the heads' last layers.
    """
    named = {"decay": [], "no_decay": []}  # type: dict[str, list[nn.Parameter]]
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad:
                is_token = name in ("cls", "mask_token")
                named["decay" if is_token or parameter.ndim > 1 else "no_decay"].append(parameter)
    return [
        {"name": name, "params": parameters, "weight_decay": weight_decay if name == "decay" else 0.0}
        for name, parameters in named.items()
        if parameters
    ]
