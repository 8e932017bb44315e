"""What changes during a run, as plain lists: one value per optimizer step, or per epoch for the temperature.

A value is looked up by the step's number, so a resumed run needs nothing of them from the checkpoint.
"""

import math


def cosine(start: float, end: float, steps: int, warmup: int = 0, warmup_start: float = 0.0) -> list[float]:
    """`steps` values: a line from `warmup_start` to `start` over `warmup` of them, then half a cosine towards `end`.

    As in DINO: the last warm-up value is `start`, and so is the first after it; step i of the n that follow has
    `end + (start - end) (1 + cos(pi i / n)) / 2`, which ends one step short of `end`.
    """
    warmup = min(warmup, steps)
    rising = [warmup_start + (start - warmup_start) * i / max(warmup - 1, 1) for i in range(warmup)]
    rest = steps - warmup
    falling = [end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * i / rest)) for i in range(rest)]
    assert len(rising) + len(falling) == steps
    return rising + falling


def line(start: float, end: float, rising: int, length: int) -> list[float]:
    """`length` values: `rising` from `start` to `end` in equal steps, both included, then `end`."""
    rising = min(rising, length)
    risen = [start + (end - start) * i / max(rising - 1, 1) for i in range(rising)]
    values = risen + [end] * (length - rising)
    assert len(values) == length
    return values
