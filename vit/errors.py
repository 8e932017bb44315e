"""The one exception that is the user's to fix; the command line prints it as a single line."""

from typing import Any, get_args, get_type_hints


class InputError(ValueError):
    """Bad input: the message says what is wrong, where (file, sample id, flag) and how to mend it."""


def reason(error: BaseException, letters: int = 200) -> str:
    """The first line of what an exception of another library says, short enough to stand in a message."""
    text = str(error).strip()
    return text.splitlines()[0][:letters] if text else type(error).__name__


def check_choices(config: Any, *names: str) -> None:
    """Raise InputError for a field whose value its `Literal` annotation does not list."""
    kinds = get_type_hints(type(config))
    for name in names:
        if getattr(config, name) not in get_args(kinds[name]):
            raise InputError(
                f"{type(config).__name__}.{name} is {getattr(config, name)!r};"
                f" choose one of {', '.join(get_args(kinds[name]))}"
            )
