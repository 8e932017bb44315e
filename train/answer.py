"""The task `answer`: train an ImageQA to answer questions about images."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanMetric

from regard.crossattn import ImageQA
from regard.crossattn.model import TOKENIZER
from regard.datasets import load_questions, require_coverage
from regard.train import memory
from regard.train.building import build, new_parts
from regard.train.checkpoints import load
from regard.train.loop import fit
from regard.train.module import RegardModule
from regard.train.optim import depth_factors
from regard.train.questions import Batch, QuestionBatches, QuestionData, fits_in_memory
from regard.train.recipe import RECIPE, AnswerRecipe, run_recipe, save_recipe
from regard.train.result import MODEL, Trained
from regard.train.scoring import losses, read, right
from regard.train.steps import is_first_rank, total_steps
from regard.vit.checkpoint import require_place
from regard.vit.errors import InputError
from regard.vit.files import typed_path
from regard.vit.lora import has_lora, merge_lora


class AnswerModule(RegardModule):
    """Trains an `ImageQA`.

    A vocabulary learns by cross-entropy (softmax) or binary cross-entropy (sigmoid) on the shares of the answers, a
    decoder by the cross-entropy of writing each of them. `layer_decay` and `new` are as in `depth_factors`.
    """

    def __init__(
        self,
        model: ImageQA,
        *,
        label_smoothing: float = 0.0,
        layer_decay: float = 1.0,
        new: Sequence[str] = (),
        **optimization: Any,
    ):
        super().__init__(**optimization)
        self.model = model
        self.label_smoothing, self.layer_decay, self.new = label_smoothing, layer_decay, new
        self.accuracy, self.loss = MeanMetric(), MeanMetric()

    def configure_optimizers(self) -> Any:
        # A recipe's warm-up suits its own data; a small set would end before the learning rate has risen.
        self.warmup_steps = min(self.warmup_steps, max(1, total_steps(self.trainer) // 10))
        return super().configure_optimizers()

    def rate_factors(self) -> Mapping[nn.Parameter, float]:
        return {} if self.layer_decay == 1 else depth_factors(self.model, self.layer_decay, self.new)

    def train(self, mode: bool = True) -> "AnswerModule":
        """Training mode for the parts that are trained; what is frozen as a whole stays in inference mode."""
        super().train(mode)
        for part in self.model.children():
            if not any(parameter.requires_grad for parameter in part.parameters()):
                part.eval()
        return self

    def losses(self, batch: Batch) -> Tensor:
        """The loss of each question `(Q,)`."""
        return losses(self.model, *read(self.model, batch), batch, self.label_smoothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses, counts = self.losses(batch), batch.counts.float()
        loss = (losses * counts).sum() / counts.sum()
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch.ids))
        return self.check_finite(loss, batch.image_ids)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        states, mask = read(self.model, batch)
        weight = batch.counts.float()
        self.accuracy.update(right(self.model, states, mask, batch).float(), weight)
        self.loss.update(losses(self.model, states, mask, batch, self.label_smoothing), weight)
        self.log("val/accuracy", self.accuracy, prog_bar=True, on_step=False, on_epoch=True)
        self.log("val/loss", self.loss, on_step=False, on_epoch=True)


@dataclass(frozen=True)
class TrainedAnswers(Trained):
    """A finished run: the model folder that `ImageQA.from_pretrained` opens, and how training went."""

    def next_commands(self) -> list[str]:
        run, data = self.quoted
        return [f"try next: regard evaluate answer --model {run} --data {data}"]


def train_answer(
    recipe: str | Path | None = None,
    *,
    out: str | Path = "runs/answer",
    resume: bool = False,
    limit: int | None = None,
    fast_dev_run: bool = False,
    profile: bool = False,
    **changes: Any,
) -> TrainedAnswers:
    """Train an ImageQA as a recipe says, in the folder `out`; the best epoch's weights go to `out/model`.

    `recipe` is a name or a YAML file (default `easy_vqa`), `changes` any field of `AnswerRecipe`. With `resume` the
    run in `out` goes on, with its own recipe, to the weights it would have reached uninterrupted. `limit`,
    `fast_dev_run` and `profile` are as in `regard.train.loop.fit`.
    Raises InputError for what the user can mend, Interrupted after Ctrl-C or SIGTERM.
    """
    folder = typed_path(out)
    settings = run_recipe(AnswerRecipe, "easy_vqa", recipe, folder, resume, changes)
    module, data = prepare(settings)
    result = fit(
        module,
        data,
        out=folder,
        epochs=settings.epochs,
        seed=settings.seed,
        resume=resume,
        save_every_steps=settings.save_every_steps,
        trainer=settings.trainer,
        claimed=lambda: _claim(settings, None if fast_dev_run else folder, module, data),
        limit=limit,
        fast_dev_run=fast_dev_run,
        profile=profile,
    )
    place = result.out / MODEL
    if is_first_rank():
        module.load_state_dict(load(result.best or result.last)["state_dict"])
        merge_lora(module.model)
        module.model.cpu().save_pretrained(place)
    return TrainedAnswers(place, result, settings.data)


def _claim(settings: AnswerRecipe, out: Path | None, module: AnswerModule, data: QuestionData) -> None:
    if out is not None:  # a trial keeps nothing
        require_place(out / MODEL, TOKENIZER)  # before the training, not after it
        save_recipe(settings, out / RECIPE)
    training, held_out = (
        f"{len(part)} images with {sum(len(image.questions) for image in part.images)} questions"
        for part in (data.training, data.held_out)
    )
    side = module.model.vit
    if settings.pretrained is not None and side.report is not None:
        print(side.report, file=sys.stderr)
    trained = "is trained too" if next(side.parameters()).requires_grad else "is kept as it is"
    trained = "gets adapters" if has_lora(side) else trained
    print(f"image side: {sum(p.numel() for p in side.parameters()):,} parameters, {trained}", file=sys.stderr)
    answers, words = len(module.model.config.answers), len(module.model.tokenizer)
    print(
        f"training on {training}, choosing the best epoch on {held_out}; {answers} answers, {words} tokens",
        file=sys.stderr,
    )
    if data.training.writer is not None and (lost := data.training.writer.left_out):
        some = ", ".join(repr(text[:40]) for text, _ in lost.most_common(3))
        print(
            f"{lost.total()} answers cannot be written by this decoder and teach nothing, such as {some}: too long, or"
            " of signs that the tokenizer lacks",
            file=sys.stderr,
        )
    print(
        memory.told(settings, module.train(), data.training.fullest(settings.batch_images)), file=sys.stderr, flush=True
    )


def prepare(recipe: AnswerRecipe) -> tuple[AnswerModule, QuestionData]:
    """The module and the data of a recipe: vocabulary and tokenizer come from the training images alone."""
    questions = load_questions(recipe.data, "train")
    training, held_out = questions.split(recipe.held_out, recipe.seed)
    model = build(recipe, training)
    if model.preprocess.size is None:
        raise InputError("training needs pictures of one size: set vit.preprocess.size")
    keep = recipe.workers == 0 and fits_in_memory(len(questions.images), model.preprocess)
    common: dict[str, Any] = {"seed": recipe.seed, "keep": keep}
    common["decoder"] = model.config.decoder
    reading = (model.tokenizer, model.config.text.max_tokens, model.config.answers, model.preprocess)
    data = QuestionData(
        QuestionBatches(
            training,
            *reading,
            questions_per_image=recipe.questions_per_image,
            shift=recipe.shift,
            **common,
        ),
        QuestionBatches(held_out, *reading, **common),
        batch_images=recipe.batch_images,
        seed=recipe.seed,
        workers=recipe.workers,
    )
    if model.config.head != "generate":  # which can answer what no list holds
        require_coverage(held_out, data.held_out.columns)
    module = AnswerModule(
        model,
        label_smoothing=recipe.label_smoothing,
        layer_decay=recipe.layer_decay,
        new=new_parts(recipe),
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        warmup_steps=recipe.warmup_steps,
        betas=(0.9, recipe.beta2),
        clip_norm=recipe.clip_norm,
    )
    return module, data
