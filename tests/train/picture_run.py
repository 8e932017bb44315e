"""A tiny run of a task on pictures for the tests, also as its own process: `python picture_run.py '{"out": ...}'`.

The pictures are files of 12 x 8 pixels (`draw`), the ViT has two blocks of width 16. The result goes to `report` as
JSON. `kill` names a moment at which the process sends itself `signum`, as in `toy_run`.
"""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from toy_run import Moment, digest

from regard.train.interrupt import Interrupted
from regard.vit.errors import InputError

CLASSES = ("dark", "left", "right")
VIT: dict[str, Any] = {
    "image_size": [12, 8],
    "patch_size": 4,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "hidden_dim": 32,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "classify": {
        "epochs": 2,
        "batch": 4,
        "lr": 3e-3,
        "warmup_steps": 2,
        "held_out": 0.3,
        "drop_path": 0.2,
        "mixup": 0.2,
        "cutmix": 1.0,
        "crop_scale": None,
        "flip": 0.0,
        "shift": 1,
        "erase": 0.25,
        "ema": 0.9,
    },
    "distill": {},
}


def draw(folder: Path, per_class: int = 13, split: str = "train", seed: int = 0) -> Path:
    """A folder of pictures: dark ones, bright ones on the left, bright ones on the right, all with noise."""
    generator = torch.Generator().manual_seed(seed)
    for label, name in enumerate(CLASSES):
        (folder / split / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            pixels = 60.0 * torch.rand(12, 8, 3, generator=generator)
            if label:
                pixels[:, (label - 1) * 4 : label * 4] += 150.0
            Image.fromarray(pixels.byte().numpy()).save(folder / split / name / f"{number:02}.png")
    return folder


def run(
    out: str,
    *,
    task: str = "classify",
    data: str | None = None,
    report: str | None = None,
    resume: bool = False,
    kill: list[Any] | None = None,
    signum: int = signal.SIGKILL,
    trainer: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train, and return what can be compared: a fingerprint of the weights, score, steps; or the error.

    `changes` are fields of the task's recipe, on top of `SETTINGS`. A resumed run follows its own recipe.
    """
    os.environ.update(environment or {})
    if report is not None:
        torch.set_num_threads(1)
        multiprocessing.set_start_method("fork", force=True)  # for the workers: this process itself came from a server
    place = Path(out)
    module = importlib.import_module(f"regard.train.{task}.task")
    fit, trained = module.fit, {}

    def watched(network: Any, *rest: Any, **options: Any) -> Any:
        trained["module"] = network
        callbacks = [Moment(kill, signum)] if kill else []
        options["trainer"] = {**(options.get("trainer") or {}), "callbacks": callbacks}
        trained["fit"] = fit(network, *rest, **options)
        return trained["fit"]

    module.fit = watched
    recipe = place.parent / f"{task}.yaml"
    recipe.write_text("{}")
    settings = {
        **SETTINGS[task],
        "data": data or str(draw(place.parent / "pictures")),
        "seed": 7,
        **changes,
        "vit": {**VIT, **changes.get("vit", {})},
        "trainer": {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, **(trainer or {})},
    }
    result: dict[str, Any] = {}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            train = getattr(module, f"train_{task}")
            done = train(out=out, resume=True) if resume else train(recipe, out=out, **settings)
            result.update(done.as_dict())
            result.update(score=trained["fit"].best_score, steps=trained["fit"].steps)
        except InputError as error:
            result["error"] = f"{type(error).__name__}: {error}"
        except Interrupted as error:
            result.update(error=f"{error}", exit_code=error.exit_code)
        finally:
            module.fit = fit
    result["stderr"] = said.getvalue()
    if "module" in trained:
        weights = {name: value.detach().cpu() for name, value in trained["module"].state_dict().items()}
        result["weights"] = digest(weights)
        result["flat"] = torch.cat([value.flatten().double() for _, value in sorted(weights.items())]).tolist()
    if report is not None:
        Path(report).write_text(json.dumps(result))
    return result


if __name__ == "__main__":
    answer = run(**json.loads(sys.argv[1]))
    sys.exit(answer.get("exit_code", 2 if "error" in answer else 0))
