"""One training step of DINO, and what DINOv2 adds where it is asked for.

B images, S = 2 + V crops of each, K prototypes. An optimizer step, in this order: learning rate and weight decay of its
number, forward, backward, the check for finite numbers, clipping, freezing, the step; then the teacher moves once, by
the momentum of that number, and the centres move once, by all batches of the step on all ranks.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.train.distill.clip import clip_gradients
from regard.train.distill.head import ProjectionHead
from regard.train.distill.ibot import MaskPlan, Masks, draw_masks, ibot_loss
from regard.train.distill.knn import KnnScore
from regard.train.distill.koleo import koleo_loss
from regard.train.distill.loss import Centre, dino_loss
from regard.train.distill.monitors import CollapseWatch, measures
from regard.train.distill.network import Network, make_teacher, move_teacher, parameter_groups, set_drop_path
from regard.train.distill.recipe import DistillRecipe
from regard.train.distill.schedules import cosine, line
from regard.train.distill.sinkhorn import sinkhorn_knopp
from regard.train.module import RegardModule
from regard.train.pictures import PictureBatch
from regard.train.sampling import mix
from regard.train.steps import epochs, steps_per_epoch, total_steps
from regard.vit import ViT, ViTConfig
from regard.vit.flops import distill_flops

PATIENCE = 500  # batches, fewer in a short run


class DistillModule(RegardModule):
    """Trains a ViT by self-distillation; `teacher.backbone` is what comes out.

    `recipe` has no null left of those that `auto.derived` fills. Student, teacher, centres and optimizer are in the
    checkpoint; the schedules follow from the step's number.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, backbone: ViT, recipe: DistillRecipe, knn: KnnScore | None = None):
        super().__init__(
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            betas=(0.9, recipe.beta2),
            clip_norm=recipe.clip_norm,
        )
        self.recipe, self.knn = recipe, knn
        assert recipe.prototypes is not None
        set_drop_path(backbone, subset=recipe.drop_path_subset, uniform=recipe.drop_path_uniform)

        def head(width: int) -> ProjectionHead:
            assert recipe.prototypes is not None
            return ProjectionHead(
                width, recipe.prototypes, recipe.hidden, recipe.bottleneck, fixed_norm=recipe.fixed_norm
            )

        patch_head = head(backbone.config.dim) if recipe.ibot and recipe.ibot_head == "own" else None
        self.student = Network(backbone, head(backbone.pool.width), patch_head)
        self.teacher = make_teacher(self.student)
        self.mask_token = nn.Parameter(torch.zeros(backbone.config.dim)) if recipe.ibot else None
        self.centre = None if recipe.sinkhorn else Centre(recipe.prototypes, recipe.centre_momentum)
        has_patch_centre = recipe.ibot and not recipe.sinkhorn
        self.patch_centre = Centre(recipe.prototypes, recipe.centre_momentum) if has_patch_centre else None
        self.masking = MaskPlan(recipe.mask_share, recipe.mask_ratio)
        self.watch = CollapseWatch(recipe.prototypes, PATIENCE)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(backbone.preprocess, name))[:, None, None]
            self.register_buffer(f"pixel_{name}", values, persistent=False)
        self._rates: dict[str, list[float]] = {}

    def train(self, mode: bool = True) -> "DistillModule":
        """The student follows; the teacher stays in inference mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def kept(self) -> tuple[str, ViTConfig]:
        return "teacher.backbone.", dataclasses.replace(self.teacher.backbone.config, drop_path=0.0)

    def networks(self) -> list[nn.Module]:
        return [self.student, self.teacher]

    # One step

    def losses(self, batch: PictureBatch) -> Tensor:
        """The loss () of a batch, the mean over its pictures; leaves no trace in the centres."""
        return self.terms(batch, 0, 0, collect=False)["loss"]

    def training_step(self, batch: PictureBatch, batch_idx: int) -> Tensor:
        terms = self.terms(batch, self.current_epoch, batch_idx)
        self.log("train/loss", terms["loss"].detach(), prog_bar=True, batch_size=len(batch.ids))
        self.watch.count(terms["dino"].detach())
        if self._is_logged():
            self._tell(terms, len(batch.ids))
        return self.check_finite(terms["loss"], batch.ids)

    def terms(self, batch: PictureBatch, epoch: int, batch_idx: int, *, collect: bool = True) -> dict[str, Tensor]:
        """The loss of a batch and its parts by name, with the teacher's answers `q (2, B, K)` and features `(2 B, D)`.

        `collect` has the centres remember the batch for their next move.
        """
        crops = [self.normalise(pixels) for pixels in batch.pixels]
        images = len(crops[0])
        both = torch.cat(crops[:2])
        masks = self._masks(both, epoch, batch_idx)
        seen, q, q_patches = self._teach(both, self._temperature(), masks, collect)
        logits, features, patches = self._learn(both, crops[2:], masks)
        dino = dino_loss(logits.unflatten(0, (-1, images)), q.unflatten(0, (2, images)), self.recipe.tau_student)
        terms = {"dino": dino.total, "dino_globals": dino.globals, "dino_locals": dino.locals}
        loss = dino.total
        if self.recipe.koleo:
            terms["koleo"] = torch.stack([koleo_loss(view) for view in features.split(images)]).sum()
            loss = loss + self.recipe.koleo * terms["koleo"]
        if masks is not None and patches is not None and q_patches is not None:
            terms["ibot"] = ibot_loss(patches, q_patches, masks, self.recipe.tau_student)
            loss = loss + self.recipe.ibot * terms["ibot"]
        return {**terms, "loss": loss, "q": q.unflatten(0, (2, images)), "features": seen}

    @torch.no_grad()
    def _teach(
        self, images: Tensor, tau: float, masks: Masks | None, collect: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The teacher's features `(2 B, D)`, its answers `(2 B, K)`, and those at the masked patches `(M, K)`."""
        features, tokens = self.teacher.look(images)
        q = self._answers(self.teacher.head(features), self.centre, tau, collect)
        if masks is None:
            return features, q, None
        patches = tokens.patches.flatten(0, 1).index_select(0, masks.places)
        head = self.teacher.patch_head or self.teacher.head
        return features, q, self._answers(head(patches), self.patch_centre, tau, collect)

    @staticmethod
    def _answers(logits: Tensor, centre: Centre | None, tau: float, collect: bool) -> Tensor:
        if centre is None:
            return sinkhorn_knopp(logits, tau)
        if collect:
            centre.add(logits)
        return centre(logits, tau)

    def _learn(
        self, both: Tensor, crops: Sequence[Tensor], masks: Masks | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The student's logits `(S B, K)`, features of the global crops `(2 B, D)`, logits at masked patches `(M, K)`.

        One pass of the backbone per resolution, one of the head.
        """
        student = self.student
        masked = None if masks is None or self.mask_token is None else (masks.masked, self.mask_token)
        features, tokens = student.look(both, masked)
        read = [features, *(student.look(crop)[0] for crop in _joined(crops))]
        hidden = None if masks is None else tokens.patches.flatten(0, 1).index_select(0, masks.places)
        if hidden is None:
            return student.head(torch.cat(read)), features, None
        if student.patch_head is not None:
            return student.head(torch.cat(read)), features, student.patch_head(hidden)
        rows = sum(map(len, read))
        logits = student.head(torch.cat([*read, hidden]))
        return logits[:rows], features, logits[rows:]

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 `(B, C, height, width)` to float32, on the device, by the backbone's mean and deviation."""
        return (pixels.float() / 255 - self.pixel_mean) / self.pixel_std

    def _masks(self, images: Tensor, epoch: int, batch_idx: int) -> Masks | None:
        if not self.recipe.ibot:
            return None
        size = self.student.backbone.config.patch_size
        height, width = (max(1, round(side / size)) for side in images.shape[2:])
        rank = self._trainer.global_rank if self._trainer is not None else 0
        dice = random.Random(mix(self.recipe.seed, epoch, batch_idx, rank))
        return draw_masks(len(images), (height, width), self.masking, dice).to(images.device)

    def validation_step(self, batch: PictureBatch, batch_idx: int) -> None:
        assert self.knn is not None
        assert isinstance(batch.pixels, Tensor)
        features, _ = self.teacher.look(self.normalise(batch.pixels))
        self.knn.add(features, batch.labels, batch.indices, batch.counts)

    def on_validation_epoch_end(self) -> None:
        assert self.knn is not None
        score = self.knn.accuracy(self._gathered)
        self.log("val/knn", score, prog_bar=True)

    def _gathered(self, rows: Tensor) -> Tensor:
        return self.all_gather(rows).flatten(0, 1) if self.trainer.world_size > 1 else rows  # type: ignore[union-attr]

    # The course of a run

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.recipe.momentum is not None
        assert self.recipe.prototypes is not None
        self._rates = self.schedules(epochs(self.trainer), steps_per_epoch(self.trainer))
        self.watch.patience = max(1, min(PATIENCE, total_steps(self.trainer) // 4))
        groups = parameter_groups(self, self.recipe.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=self.may_fuse() is None)

    def schedules(self, n_epochs: int, steps: int) -> dict[str, list[float]]:
        """By name, a value for each of `n_epochs * steps` optimizer steps; `frozen` is 1 where the last layer is."""
        r = self.recipe
        assert r.momentum is not None
        assert r.tau_teacher is not None
        assert r.tau_teacher_start is not None
        total = n_epochs * steps

        def in_steps(length: float | None) -> int:
            assert length is not None
            return round(length * steps)

        if r.tau_per == "step":
            tau = line(r.tau_teacher_start, r.tau_teacher, in_steps(r.tau_warmup_epochs), total)
        else:
            assert r.tau_warmup_epochs is not None
            by_epoch = line(r.tau_teacher_start, r.tau_teacher, round(r.tau_warmup_epochs), n_epochs)
            tau = [value for value in by_epoch for _ in range(steps)]
        frozen = in_steps(r.freeze_epochs)
        rates = {
            "lr": cosine(r.lr, r.min_lr, total, in_steps(r.warmup_epochs)),
            "weight_decay": cosine(r.weight_decay, r.weight_decay_end, total),
            "momentum": cosine(r.momentum, 1.0, total),
            "tau": tau,
            "frozen": [1.0 if step < frozen else 0.0 for step in range(total)],
        }
        assert all(len(values) == total for values in rates.values())
        return rates

    def rate(self, name: str) -> float:
        """The value of a schedule at the optimizer step in work."""
        values = self._rates[name]
        return values[min(self.trainer.global_step, len(values) - 1)]

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step, then move the teacher and the centres: here, because only here a step is known to be one."""
        momentum = self.rate("momentum")  # before the step, which counts itself
        for group in optimizer.param_groups:
            group["lr"] = self.rate("lr")
            if group["name"] == "decay":
                group["weight_decay"] = self.rate("weight_decay")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        move_teacher(self.teacher, self.student, momentum)
        for centre in (self.centre, self.patch_centre):
            if centre is not None:
                centre.move()

    def clipped_norm(self) -> Tensor:
        parts = self.student.parts()
        if self.mask_token is not None:
            parts["backbone"] = [*parts["backbone"], self.mask_token]
        norm = clip_gradients(parts, self.recipe.clip_mode, self.clip_norm)
        if self.rate("frozen"):
            # Without a gradient AdamW passes a weight by: no step, no decay, no moments.
            for parameter in self.student.last_layers():
                parameter.grad = None
        return norm

    def _temperature(self) -> float:
        tau = self.recipe.tau_teacher
        assert tau is not None
        return self.rate("tau") if self._rates else tau

    # What is told

    def picture_flops(self) -> float:
        """FLOPs of a step per picture, without iBOT's head."""
        r = self.recipe
        assert r.prototypes is not None
        assert r.local_size is not None
        return float(
            distill_flops(
                self.student.backbone.config,
                global_size=r.global_size,
                local_size=r.local_size,
                local_crops=r.local_crops,
                prototypes=r.prototypes,
                head=(r.hidden, r.hidden, r.bottleneck),
            )
        )

    def card(self) -> list[tuple[str, str]]:
        r = self.recipe
        extras = [name for name in ("sinkhorn", "koleo", "ibot", "drop_path_subset") if getattr(r, name)]
        size, local = r.global_size, r.local_size
        assert size is not None
        assert local is not None
        return [
            ("crops", f"2 of {size[0]} x {size[1]} and {r.local_crops} of {local[0]} x {local[1]}"),
            ("head", f"{r.prototypes} prototypes, rows of norm 1{'' if r.fixed_norm else ' at the start'}"),
            ("teacher", f"momentum {r.momentum} to 1, temperature {r.tau_teacher_start} to {r.tau_teacher}"),
            ("beside DINO", ", ".join(extras) or "nothing"),
        ]

    def _tell(self, terms: dict[str, Tensor], images: int) -> None:
        centre = None if self.centre is None else self.centre.centre
        measured = measures(terms["q"], terms["dino"].detach(), terms["features"], centre)
        parts: dict[str, Any] = {
            name: terms[name].detach() for name in ("dino_globals", "dino_locals", "koleo", "ibot") if name in terms
        }
        told: dict[str, Any] = {**parts, **measured, "momentum": self.rate("momentum"), "tau": self.rate("tau")}
        self.log_dict({f"train/{name}": value for name, value in told.items()}, batch_size=images)
        if self.trainer.is_global_zero:
            self.watch.speak(measured)


def _joined(crops: Sequence[Tensor]) -> list[Tensor]:
    """Neighbouring crops of one size as one batch."""
    groups: list[list[Tensor]] = []
    for crop in crops:
        if groups and groups[-1][0].shape == crop.shape:
            groups[-1].append(crop)
        else:
            groups.append([crop])
    return [torch.cat(group) for group in groups]
