"""The `regard` command: each verb is a function; its flags are the function's arguments.

A user's mistake is one line on stderr and exit code 2; Ctrl-C is 130, SIGTERM 143, a reader that closed the pipe
141 without a word, as from any other program; a traceback is a bug.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import regard

_ABOUT = "Regard turns pictures into tokens, lets words question them, and shows where every head looked."
_VERBS = """verbs:
  demo                 train on easy-VQA, ask, draw: the main job in minutes on a CPU
  ask IMAGE QUESTION…  answers with probabilities, and a map for every word
  look IMAGE           where the tokens of a ViT look, head by head; also a folder or a video
  train classify       train a ViT with labels, from scratch or from any weights
  train distill        train a ViT without labels, by self-distillation (DINO)
  train answer         train a model that answers questions about images
  evaluate classify    score a classifier; also knn (neighbours of its features) and linear (a probe on them)
  evaluate answer      score a model on a question set
  check PATH           what is in a data set of pictures, and what is broken in it
  shard SOURCE         write a data set as tar files, for sets larger than one machine
  export MODEL         write a ViT for timm, transformers, torchvision, dinov2, ONNX or torch.export
  doctor               what is installed, and what this machine can do

`regard VERB --help` tells the flags of a verb."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no ö is told \xf6 rather than nothing
            stream.reconfigure(errors="backslashreplace")
    _share_the_processors()
    try:
        code = _command(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains once more when it exits
        return 141
    except OSError as error:
        return _fail(f"cannot write to standard output: {error.strerror or error}")


def _share_the_processors() -> None:
    """Where other programs keep the processors busy, torch's waiting threads must sleep rather than spin.

    Beside one other busy program on two cores a training step took 13 times as long with OpenMP's default, and 3 times
    with this; on an idle machine the default is a tenth faster, so it is left alone there.
    """
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1):
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        usage = f"usage: regard VERB …\n\n{_ABOUT}\n\n{_VERBS}"
        print(usage, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"regard {regard.__version__}")
        return 0
    with _stopped_at_once():
        from regard.commands import COMMANDS, parse

        verb = next((verb for verb in COMMANDS if arguments[: len(verb)] == list(verb)), None)
        if verb is None:
            verbs = ", ".join(" ".join(verb) for verb in COMMANDS)
            known = any(verb[0] == arguments[0] for verb in COMMANDS)
            if known and arguments[1:2] in (["-h"], ["--help"]):
                print("\n".join(f"regard {' '.join(verb)} --help" for verb in COMMANDS if verb[0] == arguments[0]))
                return 0
            typed = " ".join(word for word in arguments[: 1 + known] if not word.startswith("-"))
            return _fail(f"there is no verb {typed!r}; choose one of {verbs}")
        from regard.vit.errors import InputError
    build, run = COMMANDS[verb]
    try:
        with _stopped_at_once():
            given = parse(build(verb), verb, arguments)
        return run(given)
    except InputError as error:
        return _fail(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        return _fail(f"not enough memory: {str(error).strip() or 'the system gave none'}; take a smaller size or batch")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BaseException as error:
        code = getattr(error, "exit_code", None)  # train's Interrupted, without importing Lightning to name it
        if code is None:
            raise
        if code:  # the other ranks of a distributed run end with 0, and rank 0 speaks for all
            print(error, file=sys.stderr)
        return code


def _is_memory(error: BaseException) -> bool:
    """Whether a device or the system had no memory left; torch's allocator on a CPU has no class of its own for it."""
    return isinstance(error, MemoryError) or any(
        word in f"{type(error).__name__} {error}" for word in ("OutOfMemoryError", "can't allocate memory")
    )


def _fail(message: str) -> int:
    print(f"regard: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """While libraries load, Ctrl-C ends the process: some catch it in the middle of an import and stumble on."""

    def stop(signum: int, frame: object) -> None:
        os.write(2, b"stopped\n")
        os._exit(130)

    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
