"""The tasks on pictures train under sharded weights what they train under DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch

TASKS: dict[str, dict[str, Any]] = {
    "classify": {"ema": 0.9, "drop_path": 0.0, "mixup": 0.0, "cutmix": 0.0},
    "distill": {
        "epochs": 2,
        "batch": 4,
        "local_crops": 2,
        "local_size": [8, 8],
        "prototypes": 32,
        "hidden": 16,
        "bottleneck": 8,
        "drop_path": 0.0,
        "momentum": 0.9,
        "koleo": 0.1,
        "ibot": 1.0,
        "mask_share": 0.5,
    },
}


def state(out: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    found = {name: value for name, value in checkpoint["state_dict"].items() if value.is_floating_point()}
    assert not any("_orig_mod" in name for name in found)
    return found


@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_the_same_under_sharded_weights(picture_run: Any, tmp_path: Path, task: str) -> None:
    ends = []
    for strategy in ("ddp", "fsdp2"):
        options = {**TASKS[task], "vit": {"key_bias": False}, "trainer": {"strategy": strategy}}
        _, report = picture_run(tmp_path / strategy, world=2, task=task, **options)
        assert report is not None
        assert "error" not in report, report["error"]
        ends.append(state(tmp_path / strategy))
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
