"""A progress bar on a terminal, plain lines elsewhere, always on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LINES = 4  # how many plain lines tell of one piece of work
_OFTEN = 100  # and how much is done from one to the next where nobody knows how much there is


@contextmanager
def bar(what: str, total: int, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Gives `update(done, total)`; a total of 0 is one that nobody knows."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(what, total=total or None)
            yield lambda done, _: progress.update(task, completed=done)
        return
    told = 0

    def update(done: int, total: int) -> None:
        nonlocal told
        if not total:
            if done // _OFTEN > told:
                told = done // _OFTEN
                print(f"{what}: {done} {unit}", file=sys.stderr, flush=True)
            return
        if done * _LINES // max(total, 1) > told:
            told = done * _LINES // max(total, 1)
            print(f"{what}: {done} of {total} {unit}", file=sys.stderr, flush=True)

    yield update
