"""`LoadReport`: what was read, renamed, folded, resized and left out, and from where."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """The account of one loading; every tensor of the source stands in `renamed` or in `unused`.

    Attributes:
        source: file, folder, hub name or module.
        layout: the layout that was recognised.
        parameters: how many numbers the model took over.
        unwrapped: wrappers, prefixes and chunks that were taken off.
        renamed: their name for each name of ours.
        folded: what was merged or dropped without changing a number the model puts out, and why.
        resized: what was resampled or adapted on loading.
        unused: tensors that no vision transformer uses, by what they are.
        assumed: what the source did not say and the layout or the caller decided.
    """

    source: str
    layout: str
    parameters: int
    unwrapped: tuple[str, ...]
    renamed: Mapping[str, str]
    folded: tuple[str, ...]
    resized: tuple[str, ...]
    unused: Mapping[str, tuple[str, ...]]
    assumed: tuple[str, ...]

    def __str__(self) -> str:
        theirs = len(set(self.renamed.values()))
        lines = [
            f"{self.source}: {self.layout} layout,"
            f" {theirs} tensors read as {len(self.renamed)}, {self.parameters:,} parameters"
        ]
        for title, notes in (
            ("unwrapped", self.unwrapped),
            ("folded", self.folded),
            ("resized", self.resized),
            ("assumed", self.assumed),
        ):
            lines += [f"  {title}: {note}" for note in notes]
        lines += [f"  not used, {what}: {_shortened(names)}" for what, names in self.unused.items()]
        return "\n".join(lines)


def _shortened(names: tuple[str, ...], limit: int = 4) -> str:
    """Names with numbers as `#`, each once."""
    kinds = list(dict.fromkeys(re.sub(r"\b\d+\b", "#", name) for name in names))
    more = f" and {len(kinds) - limit} more kinds" if len(kinds) > limit else ""
    return f"{', '.join(kinds[:limit])}{more} ({len(names)} tensors)"


@dataclass(frozen=True)
class ExportReport:
    """The account of one export.

    Attributes:
        path: the file or folder that was written.
        layout: the target as it was asked for.
        model: the class that opens it there.
        code: one line of Python that does so.
        notes: what is different there: other numbers at other sizes, a setting that the format does not hold.
    """

    path: str
    layout: str
    model: str
    code: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.layout}, {self.model}", *(f"  note: {note}" for note in self.notes)]
        return "\n".join([*lines, f"open it: {self.code}"])
