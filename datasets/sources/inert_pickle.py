"""What is written in a pickle, without doing what it says.

A pickle is a program: loading it may run anything. Here only its constants and containers are put together; what it
would import and call stands in the result as a `Call` that nobody makes.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

from regard.vit.errors import InputError

_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_GATHERED = {"LIST": list, "TUPLE": tuple}
_SMALL_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN_KINDS = ("INT", "LONG", "FLOAT", "STRING", "UNICODE", "BYTES")
_PASSED_OVER = ("PROTO", "FRAME", "STOP")


@dataclass
class Call:
    """What a pickle would have made by calling `name` with these arguments, and then set its state to."""

    name: Any
    arguments: Any
    state: Any = None


def read_pickle(data: bytes, where: str) -> Any:
    """The object of a pickle, with a `Call` in place of everything but constants, lists, tuples and dicts.

    Text of Python 2, which may be bytes, is read as Latin-1, so that `encode("latin-1")` gives the bytes back.
    Raises InputError, beginning with `where`, for what is no pickle and for instructions that no data file needs.
    """
    reader = _Reader()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            reader.step(opcode.name, argument)
        return reader.stack.pop()
    except _Unknown as error:
        raise InputError(f"{where}: holds the pickle instruction {error}, which no data file needs") from error
    except Exception as error:  # a damaged pickle breaks anywhere
        raise InputError(f"{where}: no readable pickle, or a truncated one; fetch it again") from error


class _Unknown(Exception):
    pass


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _PASSED_OVER:
            return
        if name == "MARK":
            stack.append(_MARK)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _GATHERED:
            stack.append(_GATHERED[name](self._since_mark()))
        elif name in _SMALL_TUPLES:
            count = _SMALL_TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "DICT":
            stack.append(_pairs(self._since_mark()))
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif name == "SETITEMS":
            pairs = _pairs(self._since_mark())
            stack[-1].update(pairs)
        elif name == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif name == "APPENDS":
            values = self._since_mark()
            stack[-1].extend(values)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "POP":
            stack.pop()
        elif name == "GLOBAL":
            stack.append(Call("global", argument))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [Call("global", " ".join(stack[-2:]))]
        elif name in ("REDUCE", "NEWOBJ"):
            stack[-2:] = [Call(stack[-2], stack[-1])]
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif any(kind in name for kind in _PLAIN_KINDS):
            stack.append(argument)
        else:
            raise _Unknown(name)

    def _since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values


def _pairs(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
