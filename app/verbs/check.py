"""`regard check`: what is in a data set and what is broken in it, before a GPU is hired."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard.datasets.check import SMALL, Copies, Findings, Seen, Split, examine, require_settings
from regard.datasets.images import shown
from regard.datasets.pictures import PictureSet
from regard.vit.errors import InputError
from regard.vit.files import typed_path

_EXAMPLES = 3
_LETTERS = 150


@dataclass(frozen=True)
class Check:
    """What `check` found.

    Attributes:
        data: what was looked at.
        findings: every split, and the copies within and between splits.
        problems: why a split cannot be used with its labels.
        note: what else has to be known to read the findings.
    """

    data: str
    findings: Findings
    problems: dict[str, str]
    note: str | None = None

    @property
    def leaks(self) -> list[Copies]:
        """Pictures of one split that stand in another one too."""
        return [group for group in self._groups if group.across]

    @property
    def conflicts(self) -> list[Copies]:
        """Exact copies whose labels differ. Near ones may be different things, so they are but a remark."""
        return [group for group in self.findings.exact if group.conflicting]

    @property
    def _groups(self) -> list[Copies]:
        return [*self.findings.exact, *(self.findings.near or [])]

    @property
    def broken(self) -> int:
        return sum(len(split.broken) for split in self.findings.splits.values())

    @property
    def fine(self) -> bool:
        """Nothing is broken, every split can be used, no picture stands in two of them or has two labels."""
        return not (self.broken or self.problems or self.leaks or self.conflicts)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a program to read: all ids, not a few examples."""
        told = asdict(self.findings)
        for name, split in self.findings.splits.items():
            told["splits"][name]["imbalance"] = split.imbalance
        return {"data": self.data, "fine": self.fine, "problems": self.problems, "note": self.note, **told}

    def __str__(self) -> str:
        return "\n".join([self._verdict(), *self._faults(), *self._table(), *self._remarks(), *self._next()])

    def _verdict(self) -> str:
        parts = [
            _some(len(self.problems), "split that cannot be used", "splits that cannot be used"),
            _some(self.broken, "broken picture"),
            _some(len(self.leaks), "picture in several splits", "pictures in several splits"),
            _some(len(self.conflicts), "copy with another label", "copies with other labels"),
        ]
        return f"{shown(self.data)}: {', '.join(part for part in parts if part) or 'no fault found'}"

    def _faults(self) -> list[str]:
        splits = self.findings.splits
        lines = [f"\nUNUSABLE  {name}: {problem}" for name, problem in self.problems.items()]
        broken = [(_placed(name, id), why) for name, split in splits.items() for id, why in split.broken]
        lines += _listed(
            f"BROKEN  {_some(len(broken), 'picture')} cannot be read: replace or remove, else training stops there",
            [f"{name}: {why}" for name, why in broken],
        )
        for known, how in ((self.findings.exact, "="), (self.findings.near or [], "~")):
            what = "(the same pixels): remove them from train" if how == "=" else "(nearly): look, remove true copies"
            across = [group for group in known if group.across]
            lines += _listed(
                f"LEAK  {_some(len(across), 'picture')} in several splits {what}, else scores are too high",
                [_joined(group, how) for group in across],
            )
        lines += _listed(
            f"LABELS  {_some(len(self.conflicts), 'group')} of copies with different labels: keep the right one",
            [_joined(group, "=", labels=True) for group in self.conflicts],
        )
        return lines

    def _table(self) -> list[str]:
        lines = [""]
        for name, split in self.findings.splits.items():
            seen = "" if split.looked_at == split.pictures else f" ({split.looked_at} opened)"
            lines.append(f"{name:<6}{split.pictures} pictures{seen}, {_balance(split)}")
            kinds = ", ".join(f"{kind} {count}" for kind, count in [*split.formats.items(), *split.modes.items()])
            sizes = f"height {_spread(split.height)}, width {_spread(split.width)} px"
            lines.append(f"      {sizes}; {kinds}" if split.formats else "      none could be opened")
        return lines

    def _remarks(self) -> list[str]:
        lines = [self.note] if self.note else []
        for name, split in self.findings.splits.items():
            opened = split.looked_at - len(split.broken)
            if split.unlabelled and split.counts:
                lines.append(f"{name}: {split.unlabelled} pictures have no label")
            if split.missing and name not in self.problems:
                lines.append(f"{name}: no picture of {_names(split.missing)}")
            if split.few:
                lines.append(f"{name}: few pictures of {_names(f'{few} ({split.counts[few]})' for few in split.few)}")
            if split.single:
                lines.append(f"{name}: {len(split.single)} of 1 x 1 pixel: {_names(split.single)}")
            if 0 < len(split.small) <= opened / 2:
                lines.append(f"{name}: {len(split.small)} with a side below {SMALL} pixels: {_names(split.small)}")
            if split.wrong_suffix:
                wrong = (f"{id} is {kind}" for id, kind in split.wrong_suffix)
                lines.append(
                    f"{name}: {len(split.wrong_suffix)} named as another format (read all the same): {_names(wrong)}"
                )
            if split.rotated or split.transparent:
                lines.append(
                    f"{name}: {split.rotated} turned upright by their EXIF, {split.transparent} transparent "
                    "(white shows through)"
                )
            for extreme in dict.fromkeys((split.widest, split.tallest)):
                if extreme and not 1 / 4 <= extreme[1] <= 4:
                    lines.append(
                        f"{name}: {shown(extreme[0])} has width / height {extreme[1]:.3g}: a crop shows little of it"
                    )
        for groups, near in ((self.findings.exact, ""), (self.findings.near or [], "near ")):
            within = [group for group in groups if not group.across]
            if within:
                copies = sum(len(group.pictures) - 1 for group in within)
                example = _joined(within[0], "~" if near else "=")
                lines.append(f"{_some(copies, f'{near}copy', f'{near}copies')} within a split, such as {example}")
        differing = [group for group in self.findings.near or [] if group.conflicting]
        if differing:
            example = _joined(differing[0], "~", labels=True)
            lines.append(
                f"{_some(len(differing), 'group')} of near copies with different labels, right if they show different "
                f"things, such as {example}"
            )
        return [f"  - {line}" for line in lines]

    def _next(self) -> list[str]:
        if self.fine:
            return []
        return ["", f"all of it: regard check {shown(self.data)} --json"]


def _some(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}" if count else ""


def _listed(heading: str, items: list[str]) -> list[str]:
    if not items:
        return []
    lines = [f"\n{heading}", *(f"    {_short(item)}" for item in items[:_EXAMPLES])]
    return [*lines, f"    … and {len(items) - _EXAMPLES} more"] if len(items) > _EXAMPLES else lines


def _short(text: str) -> str:
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def _placed(split: str, name: str) -> str:
    """An id, with its split before it where it does not tell it."""
    return shown(name) if split == "all" or split in name else f"{split}: {shown(name)}"


def _joined(group: Copies, how: str, labels: bool = False) -> str:
    def told(picture: Seen) -> str:
        return _placed(picture.split, picture.id) + (f" ({picture.label})" if labels else "")

    differ = sorted(group.pictures, key=lambda picture: (picture.split, picture.label or ""))
    seen: list[Seen] = []
    for picture in differ:  # first one of each split, or of each label: what the line is about
        if all((p.split, p.label) != (picture.split, picture.label) for p in seen):
            seen.append(picture)
    seen = (seen + [picture for picture in group.pictures if picture not in seen])[:_EXAMPLES]
    more = len(group.pictures) - len(seen)
    return f" {how} ".join(map(told, seen)) + (f" and {more} more" if more else "")


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _EXAMPLES} more" if len(listed) > _EXAMPLES else ""
    return _short(", ".join(map(shown, listed[:_EXAMPLES]))) + more


def _spread(values: tuple[int, int, int]) -> str:
    low, middle, high = values
    return str(low) if low == high else f"{low}..{high} (median {middle})"


def _balance(split: Split) -> str:
    there = {name: count for name, count in split.counts.items() if count}
    if not there:
        return "without labels"
    least, most = min(there, key=there.__getitem__), max(there, key=there.__getitem__)
    if there[least] == there[most]:
        return f"{len(there)} classes of {there[most]}"
    return (
        f"{len(there)} classes from {there[least]} ({least}) to {there[most]} ({most}), imbalance {split.imbalance:.3g}"
    )


def check(
    path: str | Path,
    *,
    split: str | None = None,
    near: bool = True,
    limit: int | None = None,
    workers: int = 0,
) -> Check:
    """Tell what is in a set of pictures and what to mend; exit code 0: fine, 1: something to mend, 2: could not look.

    To mend are broken files, copies in two splits or with two labels, and what `regard train classify` refuses.

    Args:
        path: whatever `regard train` takes as data: a folder, a table, tar shards, a known set by its name, easy-vqa.
        split: look at this split alone; default: all of them.
        near: also find pictures that look the same though their pixels differ (resized, saved again).
        limit: open so many pictures of each split, spread evenly; default: all.
        workers: threads that open pictures.

    Raises:
        InputError: no pictures there, some that are known to be missing, a table that cannot be read, a wrong setting.
    """
    from regard.progress import bar

    require_settings(limit, workers)
    sets, problems, note = _sets(path, split)
    total = sum(min(len(pictures), limit or len(pictures)) for pictures in sets.values())
    with bar("looking", total, "pictures") as progress:
        findings = examine(sets, near=near, limit=limit, workers=workers, progress=progress)
    return Check(str(path), findings, problems, note)


def _sets(data: str | Path, split: str | None) -> tuple[dict[str, PictureSet], dict[str, str], str | None]:
    """The splits to look at; why some cannot be used with their labels; and a note where none has any."""
    from regard.datasets.pictures import load_pictures, splits_of

    if questioned := _questioned(data, split):
        return questioned, {}, "labels are not looked at: this is a set of questions"
    there = splits_of(data)
    names = (split,) if split else there or ("train",)
    sets: dict[str, PictureSet] = {}
    problems: dict[str, str] = {}
    for name in names:
        known = name if there else "all"
        try:
            sets[known] = load_pictures(data, name)
        except InputError as error:
            sets[known] = _without_help_of_train(data, name)
            problems[known] = str(error)
            continue
        if refused := _refused(sets[known], name, sets.get("train")):
            problems[known] = refused
    if (
        len(problems) == len(names)
        and not any(pictures.classes for pictures in sets.values())
        and not _tells_labels(data)
    ):
        return sets, {}, "nothing tells a label, neither class folders nor a column: enough for regard train distill"
    return sets, problems, None


def _refused(pictures: PictureSet, split: str, training: PictureSet | None) -> str | None:
    """Why `regard train classify` would refuse a split that can be loaded."""
    from regard.datasets.pictures import require_classes

    if split == "train":
        try:
            require_classes(pictures)
        except InputError as error:
            return f"{error}; regard train distill takes it as it is"
    elif training is not None and training.classes and training.classes != pictures.classes:
        return f"{pictures.name}: its classes are not those of {training.name}"
    return None


def _without_help_of_train(data: str | Path, split: str) -> PictureSet:
    """A split whose classes are not those of train: with the classes that its folder has itself, else without any."""
    from regard.datasets.pictures import load_pictures
    from regard.datasets.sources.folder import split_folders

    folder = split_folders(typed_path(data)).get(split)
    if folder is not None:
        try:
            return load_pictures(folder)
        except InputError:  # the one that is being told already
            pass
    return load_pictures(data, split, labelled=False)


def _tells_labels(data: str | Path) -> bool:
    """Whether labels were meant to be there: class folders, a column of a table, files beside pictures in shards."""
    from regard.datasets.rows import read_rows
    from regard.datasets.sources.folder import class_names, split_folders
    from regard.datasets.sources.lists import COLUMNS
    from regard.datasets.sources.tar import is_shards, tells_labels

    if is_shards(data):
        return tells_labels(str(data))
    path = typed_path(data)
    if path.is_file():
        return any(column in row.fields for row in read_rows(path) for column in COLUMNS["label"])
    return any(class_names(folder) for folder in split_folders(path).values() or [path])


def _questioned(data: str | Path, split: str | None) -> dict[str, PictureSet]:
    """The pictures of easy-VQA, where that is what `data` is."""
    from regard.datasets.easy_vqa import SPLITS, is_easy_vqa
    from regard.datasets.load import load_questions

    if str(data) != "easy-vqa" and not (typed_path(data).is_dir() and is_easy_vqa(typed_path(data))):
        return {}
    return {name: _pictures_of(load_questions(data, name)) for name in ((split,) if split else SPLITS)}


def _pictures_of(questions: Any) -> PictureSet:
    import torch

    from regard.datasets.sources.files import FolderFiles, Names

    paths = [image.path for image in questions.images]
    root = paths[0].parent.parent.parent
    names = Names(str(path.relative_to(root)) for path in paths)
    return PictureSet(questions.name, (), torch.full((len(paths),), -1), files=FolderFiles(str(root), names))
