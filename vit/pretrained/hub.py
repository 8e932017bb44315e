"""Names of the Hugging Face hub and of timm, and fetching what they stand for."""

import re
from collections.abc import Iterable
from pathlib import Path

from regard.vit.errors import InputError, reason

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TIMM = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+(\.[a-z0-9_]+)?")
_PREFIXED = re.compile(r"hf[-_]hub:")  # as timm and open_clip write a hub name
_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".ckpt")
TOKENIZER = "tokenizer.json"


def is_name(text: str) -> bool:
    """Whether it has the form `owner/name`."""
    return _NAME.fullmatch(text) is not None and not text.startswith((".", "~", "/"))


def fetch(name: str, beside: Iterable[str], weights: Iterable[str]) -> Path:
    """The local folder of a repository `owner/name`, or of timm's repository for an architecture's name.

    Of the files with weights only one is fetched: the first of `weights` that is there, or else the only one. Without
    a connection it is what an earlier call has fetched.
    Raises InputError where there is no such repository, where it holds no weights, and where nothing can be reached.
    """
    repository = repository_of(name)
    from huggingface_hub import model_info

    try:
        files = {file.rfilename for file in model_info(repository).siblings or ()}
    except Exception as error:  # the hub's own kinds, and whatever the HTTP client beneath it lets through
        cached = _cached(repository)
        if cached is not None:
            return cached
        raise _not_given(name, error) from error
    return snapshot(name, repository, [*beside, TOKENIZER, *_chosen(name, files, tuple(weights))])


def snapshot(name: str, repository: str, files: list[str]) -> Path:
    """The local folder of a repository with these files, fetched once. Raises InputError where the hub gives none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=files))
    except Exception as error:
        cached = _cached(repository)
        if cached is not None:
            return cached
        raise _not_given(name, error) from error


def repository_of(name: str) -> str:
    """`owner/name` as it is; timm's `vit_small_patch16_224.augreg_in1k` as `timm/...`, with its default tag if none.

    Raises InputError for what is neither, and for a name of timm's without a tag where timm is not there to add it.
    """
    name = _PREFIXED.sub("", name, count=1)
    plain = name.removeprefix("timm/")
    if is_name(name) and (plain == name or "." in plain):
        return name
    if not _TIMM.fullmatch(plain):
        raise InputError(f"no model at {name!r}: no such file or folder, no hub name owner/name, and no name of timm's")
    return f"timm/{plain}" if "." in plain else _with_default_tag(name, plain)


def _with_default_tag(name: str, architecture: str) -> str:
    try:
        import timm
        from timm.models import get_pretrained_cfg
    except Exception as error:  # not there, or broken by another package of another build
        raise InputError(
            f"{name!r} names an architecture of timm without its weights; add their tag, as in"
            f" vit_small_patch16_224.augreg_in21k_ft_in1k, or install timm, which knows the default ({reason(error)})"
        ) from error
    found = get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    if found is None or not found.hf_hub_id:
        raise InputError(f"no model called {name!r}: no such file, and timm has no weights by this name")
    return str(found.hf_hub_id)


def _chosen(name: str, files: set[str], weights: tuple[str, ...]) -> list[str]:
    best = next((file for file in weights if file in files), None)
    if best is not None and best.endswith(".index.json"):
        return [best, best.removesuffix(".index.json").replace(".", "-*.", 1)]
    if best is not None:
        return [best]
    single = sorted(file for file in files if "/" not in file and file.endswith(_SUFFIXES))
    safe = [file for file in single if file.endswith(".safetensors")]
    if len(safe) == 1 or len(single) == 1:
        return safe[:1] or single
    held = ", ".join((single or sorted(files))[:4]) or "nothing"
    what = "several files with weights" if single else "no weights that Regard reads"
    raise InputError(
        f"the repository {name!r} holds {what} ({held}); fetch the file that is meant and name it"
        if single
        else f"the repository {name!r} holds {what} ({held})"
    )


def _cached(repository: str) -> Path | None:
    """What an earlier call has fetched, where the hub cannot be reached now."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except Exception:
        return None
    return folder if any(file.name.endswith((*_SUFFIXES, ".bin")) for file in folder.iterdir()) else None


def _not_given(name: str, error: Exception) -> InputError:
    return InputError(
        f"no model called {name!r}: no such file or folder, and the hub did not give it ({reason(error)})"
    )
