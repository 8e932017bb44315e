"""What a step will need is known before it is taken."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from regard.train import memory
from regard.train.answer import prepare
from regard.train.memory import GIB, MemoryEstimate, estimate, told
from regard.train.recipe import load_recipe

# A process of its own: its peak is that of the steps, and its allocator gives back what is freed.
MEASURE = """
import json, sys, threading, time
import torch
from regard.train.answer import prepare
from regard.train.memory import estimate
from regard.train.recipe import load_recipe

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.set_num_threads(1)
module, data = prepare(load_recipe("easy_vqa", **json.loads(sys.argv[1])))
module.train()
batch = data.training.fullest(16)
expected = estimate(module, batch)
before, most, done = resident(), [0], [False]

def watch():
    while not done[0]:
        most[0] = max(most[0], resident())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)
for _ in range(2):
    loss = module.losses(batch).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
done[0] = True
watcher.join()
print(json.dumps({"expected": expected.total, "measured": most[0] - before + expected.weights}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "given",
    [{}, {"head": "rank", "decoder": {"text": {"dim": 256, "heads": 4}}, "gradient_checkpointing": True}],
    ids=["vocabulary", "decoder, recomputed"],
)
def test_the_estimate_is_within_30_percent_of_what_a_step_takes(squares: Any, given: dict[str, Any]) -> None:
    sizes = {"image_size": [64, 96], "dim": 256, "heads": 4, "depth": 6}
    settings = {"data": str(squares), "vit": sizes, "text": {"dim": 256, "heads": 4, "depth": 2}, **given}
    arguments = [sys.executable, "-c", MEASURE, json.dumps(settings)]
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, **environment}, timeout=250)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["measured"] > 100e6
    assert 1 / 1.3 < found["expected"] / found["measured"] < 1.3, found


def estimated(settings: dict[str, Any]) -> MemoryEstimate:
    given = load_recipe(settings["recipe"], **{k: v for k, v in settings.items() if k != "recipe"})
    module, data = prepare(given)
    return estimate(module.train(), data.training.fullest(given.batch_images))


def test_weights_gradients_and_moments_are_counted_as_they_are(small: dict[str, Any]) -> None:
    given = load_recipe(small["recipe"], **{k: v for k, v in small.items() if k != "recipe"})
    module, _ = prepare(given)
    size = sum(4 * p.numel() for p in module.parameters())
    found = estimated(small)
    assert (found.weights, found.gradients, found.optimizer) == (size, size, 2 * size)
    assert found.total == 4 * size + found.activations
    frozen = estimated({**small, "freeze_vit": True})
    side = sum(4 * p.numel() for p in module.model.vit.parameters())
    assert (frozen.weights, frozen.gradients) == (size, size - side)
    assert frozen.activations < found.activations


def test_every_way_to_spare_memory_is_seen(small: dict[str, Any]) -> None:
    deep = {**small, "vit": {**small["vit"], "depth": 4}}
    plain = estimated(deep)
    assert estimated({**deep, "gradient_checkpointing": True}).activations < 0.7 * plain.activations
    assert estimated({**deep, "batch_images": 1}).activations < 0.6 * plain.activations


def test_an_estimate_leaves_model_and_chance_as_they_are(small: dict[str, Any]) -> None:
    given = load_recipe(small["recipe"], **{k: v for k, v in small.items() if k != "recipe"})
    module, data = prepare(given)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    chance = torch.get_rng_state()
    for half in (None, torch.bfloat16):
        estimate(module.train(), data.training.fullest(3), half)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_too_little_memory_is_a_warning_that_says_what_to_turn(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = load_recipe(small["recipe"], **{k: v for k, v in small.items() if k != "recipe"})
    module, data = prepare(given)
    batch = data.training.fullest(3)
    assert "warning" not in told(given, module, batch)
    monkeypatch.setattr(memory, "available", lambda accelerator: (GIB // 2**20, "this machine"))
    said = told(given, module, batch)
    assert "warning: that is more than the 0.0 GiB of this machine" in said
    for way in ("gradient_checkpointing true", "freeze_vit true", "batch_images below 3"):
        assert way in said
    assert "lora" not in said, "a preset has nothing to adapt"
