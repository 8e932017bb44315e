"""The verbs of the `regard` command as parsers: a verb's flags are its function's arguments."""

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser

import regard
from regard.vit.errors import InputError

_Build = Callable[[tuple[str, ...]], ArgumentParser]
_Run = Callable[[dict[str, Any]], int]


# jsonargparse tells of a value outside of a list in the words of Python's types.
_CHOICES = re.compile(r'Parser key "([\w.]+)":.*?typing\.Literal\[(.+?)\].*?(?:Got|Given) value: (\S+)')


class _Parser(ArgumentParser):
    """One line for a wrong flag, as for every other mistake."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        message = " ".join(message.split())
        if found := re.search(r"[Uu]nrecognized arguments: (--[\w.]+)", message):
            near = difflib.get_close_matches(found[1], list(self._option_string_actions), n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        if found := _CHOICES.search(message):
            name, choices, given = found.groups()
            message = f"--{name} is {given.strip()!r}; choose one of {choices.replace(chr(39), '')}"
        print(f"regard: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def _parser(verb: tuple[str, ...], description: str) -> ArgumentParser:
    text = description.strip().split("\n")[0]
    return _Parser(prog=f"regard {' '.join(verb)}", description=text, allow_abbrev=False)


def parse(parser: ArgumentParser, verb: tuple[str, ...], arguments: list[str]) -> dict[str, Any]:
    # Only what was typed: the functions hold their own defaults, and a resumed run the settings it was started with.
    words = _paired(arguments[len(verb) :])
    typed = [_NESTED.sub(lambda found: found[1] + found[2].replace(".", "/"), word) for word in words]
    return {name: _unfolded(value) for name, value in parser.parse_args(typed, defaults=False).as_dict().items()}


def _paired(words: list[str]) -> list[str]:
    """`--image_size 224 336` as `--image_size [224,336]`, `--size` too: two numbers after the flag are one size."""
    paired = list(words)
    for place, word in enumerate(words[:-2]):
        size = words[place + 1 : place + 3]
        if re.fullmatch(r"--(\w+\.)*(image_)?size", word) and all(side.isdigit() for side in size):
            paired[place + 1 : place + 3] = [f"[{','.join(size)}]"]
            return [*paired[: place + 2], *_paired(paired[place + 2 :])]
    return paired


# jsonargparse loses one of two flags that reach into the same mapping within a mapping, so it meets them as one name.
_NESTED = re.compile(r"^(--\w+\.)(\w+(?:\.\w+)+)(?==|$)")


def _unfolded(value: Any) -> Any:
    """`{"a/b": 1, "a": {"c": 2}}` as `{"a": {"b": 1, "c": 2}}`; what was typed later wins."""
    from regard.vit.values import merged

    if not isinstance(value, dict):
        return value
    whole: dict[str, Any] = {}
    for name, inner in value.items():
        for part in reversed(str(name).split("/")[1:]):
            inner = {part: inner}
        whole = merged(whole, {str(name).split("/")[0]: inner})
    return whole


def _with_json(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _show(result: Any, as_json: bool) -> int:
    print(json.dumps(result.as_dict()) if as_json else result)
    return 0


def _function(verb: tuple[str, ...], function: Callable[..., Any], *positional: str) -> ArgumentParser:
    """A parser from a function's signature and docstring."""
    parser = _parser(verb, function.__doc__ or "")
    for name in positional:
        nargs: dict[str, Any] = {"nargs": "+"} if name.endswith("s") else {}
        parser.add_argument(name, type=str, **nargs)
    parser.add_function_arguments(function, skip=set(positional))
    return _with_json(parser)


def _ask(verb: tuple[str, ...]) -> ArgumentParser:
    parser = _parser(verb, regard.ask.__doc__ or "")
    parser.add_argument("image", type=str)
    parser.add_argument(
        "questions", type=str, nargs="*", help="none: look once, then take questions until an empty line"
    )
    # As text: jsonargparse would take the brackets and the null of YAML for Python's.
    parser.add_argument("--candidates", type=str, help="the only answers allowed, separated by commas")
    parser.add_function_arguments(regard.ask, skip={"image", "questions", "candidates"})
    return _with_json(parser)


def _run_ask(given: dict[str, Any]) -> int:
    if given.get("questions"):
        return _run("ask")(given)
    as_json = given.pop("json", False)
    given.pop("questions", None)
    if given.pop("out", None) is not None:
        raise InputError("--out draws the maps of questions given on the command line; give at least one")
    from regard.verbs.ask import answer_as_dict, converse, told

    answered = asked = 0
    for question, answer in converse(questions=_typed_questions(), **given):
        asked += 1
        if not isinstance(answer, InputError):
            answered += 1
            text = told(answer).split("\n", 1)[1] if _is_typed() else told(answer)  # a terminal shows the question
            print(json.dumps(answer_as_dict(answer)) if as_json else text, flush=True)
        elif as_json:
            print(json.dumps({"question": question, "error": str(answer)}), flush=True)
        elif sys.stderr is not None:
            print(f"regard: {answer}", file=sys.stderr)
    if not asked and not _is_typed():
        raise InputError("no question was given, neither on the command line nor on standard input")
    return 0 if answered or not asked else 2


def _is_typed() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _typed_questions() -> Iterator[str]:
    """Lines of standard input, asked for where a person types them."""
    if not _is_typed():
        for line in sys.stdin or ():  # noqa: UP028  # `yield from` would close it
            yield line
        return
    while True:
        try:
            yield input("question (an empty line ends): ")
        except EOFError:
            print()
            return


def _of(function: str, *positional: str) -> _Build:
    """The parser of a verb that is one function."""

    def build(verb: tuple[str, ...]) -> ArgumentParser:
        return _function(verb, getattr(regard, function), *positional)

    return build


_RECIPES = {
    "answer": ("regard.train.recipe", "AnswerRecipe"),
    "classify": ("regard.train.classify.recipe", "ClassifyRecipe"),
    "distill": ("regard.train.distill.recipe", "DistillRecipe"),
}


def _train(verb: tuple[str, ...]) -> ArgumentParser:
    from regard.train.recipe import load_recipe, names

    task = verb[1]
    module, name = _RECIPES[task]
    kind = getattr(import_module(module), name)
    parser = _parser(verb, getattr(regard, f"train_{task}").__doc__ or "")
    default = "easy_vqa" if task == "answer" else "fashion_mnist for that set; for other data what stands here"
    parser.add_argument(
        "--recipe", type=str, help=f"one of {', '.join(names(kind))}, or a YAML file (default: {default})"
    )
    parser.add_argument("--out", type=str, help=f"folder of the run (default: runs/{task})")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--limit", type=int, help="use so many training images an epoch, others in each")
    parser.add_argument(
        "--fast_dev_run", action="store_true", help="a few steps that prove the settings; keeps nothing"
    )
    parser.add_argument(
        "--profile", action="store_true", help="tell where a step's time goes; a trace goes to OUT/logs"
    )
    parser.add_class_arguments(kind, skip={"about"})
    own = vars(load_recipe("easy_vqa" if task == "answer" else None, kind))
    parser.set_defaults({name: value for name, value in own.items() if name != "about"})  # what --help tells
    return _with_json(parser)


def _run_train(task: str) -> _Run:
    def run(given: dict[str, Any]) -> int:
        as_json = given.pop("json", False)
        trained = getattr(regard, f"train_{task}")(given.pop("recipe", None), **given)
        from lightning.pytorch.utilities import rank_zero_only

        return _show(trained, as_json) if rank_zero_only.rank == 0 else 0  # type: ignore[attr-defined]

    return run


def _run(function: str) -> Callable[[dict[str, Any]], int]:
    def run(given: dict[str, Any]) -> int:
        as_json = given.pop("json", False)
        return _show(getattr(regard, function)(**given), as_json)

    return run


def _run_doctor(given: dict[str, Any]) -> int:
    diagnosis = regard.doctor()
    return _show(diagnosis, given.get("json", False)) or int(bool(diagnosis.missing))


def _run_check(given: dict[str, Any]) -> int:
    as_json = given.pop("json", False)
    checked = regard.check(**given)
    return _show(checked, as_json) or int(not checked.fine)


COMMANDS: dict[tuple[str, ...], tuple[_Build, _Run]] = {
    ("demo",): (_of("demo"), _run("demo")),
    ("ask",): (_ask, _run_ask),
    ("look",): (_of("look", "image"), _run("look")),
    ("train", "answer"): (_train, _run_train("answer")),
    ("train", "classify"): (_train, _run_train("classify")),
    ("train", "distill"): (_train, _run_train("distill")),
    ("evaluate", "answer"): (_of("evaluate_answer"), _run("evaluate_answer")),
    ("evaluate", "classify"): (_of("evaluate_classify"), _run("evaluate_classify")),
    ("evaluate", "knn"): (_of("evaluate_knn"), _run("evaluate_knn")),
    ("evaluate", "linear"): (_of("evaluate_linear"), _run("evaluate_linear")),
    ("check",): (_of("check", "path"), _run_check),
    ("shard",): (_of("shard", "source"), _run("shard")),
    ("export",): (_of("export", "model"), _run("export")),
    ("doctor",): (_of("doctor"), _run_doctor),
}
