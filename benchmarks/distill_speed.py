"""A DINO step of ours against one of lightly's parts, same ViT, same crops, same optimizer, in one run.

    python benchmarks/distill_speed.py [--case vit-s/16] [--images 8] [--prototypes 65536] [--rounds 7] [--threads 1]
    python benchmarks/distill_speed.py --peer-optimizer default         # theirs with torch's own choice of AdamW

lightly comes with neither recipe nor trainer: what is timed is the step its documentation shows, with its
`DINOProjectionHead`, `DINOLoss` and `update_momentum`: each view goes through backbone and head by itself, and the
teacher moves first. Ours is `DistillModule`'s step without Lightning. Both begin with the same weights, and it is
checked that their first losses agree. They take turns in one process, so a busy machine slows both; a ratio is the
median, over the rounds, of their time / ours.

A third side, `lightly batched`, has lightly's parts in our order: views of one size joined, the head called once.
It tells how much of the ratio is order, and how much the parts. Then each part is timed by itself.

Regard does not need lightly: `pip install --no-deps --target FOLDER lightly==1.6.0`, then pass `--lightly FOLDER`.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from peers import peer
from torch import Tensor, nn

from regard.train.distill.clip import clip_gradients
from regard.train.distill.loss import dino_loss
from regard.train.distill.module import DistillModule
from regard.train.distill.network import move_teacher, parameter_groups
from regard.train.distill.recipe import DistillRecipe
from regard.train.pictures import PictureBatch
from regard.vit import ViT
from regard.vit.config import preset_config

CASES: dict[str, tuple[str, int, int, int]] = {  # preset, patch, side of global and local crops
    "vit-ti/16": ("tiny", 16, 96, 48),
    "vit-s/16": ("small", 16, 96, 48),
    "vit-s/16 224": ("small", 16, 224, 96),
}
MOMENTUM, TAU = 0.996, 0.04
Step = Callable[[PictureBatch], Tensor]


class Feature(nn.Module):
    """What lightly calls a backbone: images to one vector each."""

    def __init__(self, vit: ViT):
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        return self.vit.pool(self.vit(images))


def ours(module: DistillModule) -> Step:
    optimizer = torch.optim.AdamW(parameter_groups(module, 0.04), lr=5e-4, fused=True)

    def step(batch: PictureBatch) -> Tensor:
        loss = module.terms(batch, 0, 0)["loss"]
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(module.student.parts(), "global", 3.0)
        optimizer.step()
        move_teacher(module.teacher, module.student, MOMENTUM)
        assert module.centre is not None
        module.centre.move()
        return loss.detach()

    return step


def theirs(module: DistillModule, lightly: Any, prototypes: int, *, fused: bool, batched: bool) -> Step:
    backbone = Feature(module.student.backbone)
    head = lightly.models.modules.DINOProjectionHead(module.student.backbone.pool.width, output_dim=prototypes)
    with torch.no_grad():
        linears = [layer for layer in head.layers if isinstance(layer, nn.Linear)]
        for layer, own in zip(linears, module.student.head.mlp[::2], strict=True):
            layer.load_state_dict(own.state_dict())  # type: ignore[union-attr]
        head.last_layer.weight_v.copy_(module.student.head.directions)
    teacher = copy.deepcopy(backbone).requires_grad_(False)
    teacher_head = lightly.models.modules.DINOProjectionHead(module.student.backbone.pool.width, output_dim=prototypes)
    teacher_head.load_state_dict(head.state_dict())  # after a copy of weights such a head cannot be copied whole
    teacher_head.requires_grad_(False)
    criterion = lightly.loss.DINOLoss(prototypes, TAU, TAU, warmup_teacher_temp_epochs=0)
    student = nn.ModuleList([backbone, head])
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.04, fused=True if fused else None)

    def each(views: list[Tensor], network: nn.Module, last: nn.Module) -> list[Tensor]:
        if not batched:
            return [last(network(view).flatten(start_dim=1)) for view in views]
        parts = [torch.cat(part) for part in (views[:2], views[2:]) if part]
        return list(last(torch.cat([network(part) for part in parts])).chunk(len(views)))

    def step(batch: PictureBatch) -> Tensor:
        views = [module.normalise(pixels) for pixels in batch.pixels]
        lightly.models.utils.update_momentum(backbone, teacher, m=MOMENTUM)
        lightly.models.utils.update_momentum(head, teacher_head, m=MOMENTUM)
        with torch.no_grad():
            targets = each(views[:2], teacher, teacher_head)
        loss = criterion(targets, each(views, backbone, head))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        return loss.detach()

    return step


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    lightly = lightly_of(arguments.lightly)
    preset, patch, whole, part = CASES[arguments.case]
    recipe = DistillRecipe(
        prototypes=arguments.prototypes,
        tau_teacher=TAU,
        tau_teacher_start=TAU,
        tau_warmup_epochs=0.0,
        momentum=MOMENTUM,
        freeze_epochs=0.0,
        warmup_epochs=0.0,
        local_crops=arguments.local_crops,
        local_size=(part, part),
        drop_path=0.0,
    )

    def module() -> DistillModule:
        torch.manual_seed(0)
        return DistillModule(ViT(preset_config(preset, patch_size=patch, image_size=(whole, whole))), recipe).train()

    sizes = [whole] * 2 + [part] * arguments.local_crops
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.images, 3)
    pixels = [torch.randint(0, 256, (*shape, s, s), generator=generator, dtype=torch.uint8) for s in sizes]
    count = arguments.images
    numbers = torch.arange(count)
    batch = PictureBatch(pixels, numbers, numbers >= 0, [""] * count, numbers, numbers, [])
    fused = arguments.peer_optimizer == "fused"
    sides = {
        "regard": ours(module()),
        "lightly": theirs(module(), lightly, arguments.prototypes, fused=fused, batched=False),
        "lightly batched": theirs(module(), lightly, arguments.prototypes, fused=fused, batched=True),
    }
    losses = {name: [float(step(batch)) for _ in range(2)] for name, step in sides.items()}  # also warms up
    for name, (first, second) in losses.items():
        for value, own in zip((first, second), losses["regard"], strict=True):
            assert abs(value - own) < 1e-3 * own, f"{name} computes something else: {value}, ours {own}"
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds):
        turn = list(sides) if number % 2 else list(reversed(sides))
        for name in turn:
            times[name].append(timed(lambda name=name: sides[name](batch)))  # type: ignore[misc]
    own = times["regard"]
    ratios = {
        name: round(statistics.median(t / o for t, o in zip(took, own, strict=True)), 3)
        for name, took in times.items()
        if name != "regard"
    }
    return {
        "case": arguments.case,
        "crops": f"2 x {whole} + {arguments.local_crops} x {part} px",
        "images": count,
        "prototypes": arguments.prototypes,
        "threads": arguments.threads,
        "peer optimizer": f"AdamW, {arguments.peer_optimizer}",
        "ratio": ratios,
        "rounds": arguments.rounds,
        "parts": parts(module(), lightly, arguments),
    }


def parts(module: DistillModule, lightly: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Their time / ours for each part by itself, and of our step's parts the share of time in them."""
    count, prototypes, crops = arguments.images, arguments.prototypes, 2 + arguments.local_crops
    student = torch.randn(crops, count, prototypes, requires_grad=True)
    q = torch.softmax(torch.randn(2, count, prototypes), -1)
    criterion = lightly.loss.DINOLoss(prototypes, TAU, TAU, warmup_teacher_temp_epochs=0)
    logits = torch.randn(2, count, prototypes)
    other = copy.deepcopy(module.student)
    head, width = module.student.head, module.student.backbone.pool.width
    their_head = lightly.models.modules.DINOProjectionHead(width, output_dim=prototypes)
    x = torch.randn(crops * count, width)
    assert module.centre is not None
    centre = module.centre

    def our_loss() -> None:
        dino_loss(student, centre(logits, TAU)).total.backward()
        centre.add(logits)
        centre.move()

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "loss and centre": (our_loss, lambda: criterion(list(logits), list(student)).backward()),
        "head": (
            lambda: head(x).sum().backward(),
            lambda: torch.stack([their_head(part) for part in x.chunk(crops)]).sum().backward(),
        ),
        "teacher": (
            lambda: move_teacher(module.teacher, module.student, MOMENTUM),
            lambda: lightly.models.utils.update_momentum(module.student, other, m=MOMENTUM),
        ),
    }
    del q
    found = {}
    for name, (mine, their) in pairs.items():
        rounds = [(timed(their), timed(mine)) for _ in range(max(3, arguments.rounds // 2) + 1)][1:]
        found[name] = round(statistics.median(t / o for t, o in rounds), 2)
    return found


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def lightly_of(folder: str | None) -> Any:
    """Import lightly, which needs torchvision."""
    if folder:
        sys.path.append(folder)
    peer("torchvision")
    try:
        import lightly.loss
        import lightly.models.modules
        import lightly.models.utils
    except ImportError as error:
        sys.exit(
            f"lightly cannot be imported ({error}); pip install --no-deps --target FOLDER lightly==1.6.0, then "
            "pass --lightly FOLDER"
        )
    return lightly


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="vit-s/16")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--local-crops", type=int, default=6)
    parser.add_argument("--prototypes", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer-optimizer", choices=("fused", "default"), default="fused")
    parser.add_argument("--lightly", help="folder that lightly was installed into")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
