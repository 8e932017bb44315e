import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)

Toy = Callable[..., tuple[int, dict[str, Any] | None]]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Runs `toy_run.run(out, ...)` in a process of its own; gives (exit code, its report or None).

    The processes fork from a server that has imported Lightning once, so each starts in milliseconds.
    With `world`, there are so many ranks; the exit code and the report are those of rank 0.
    """
    return _runner("toy_run", tmp_path_factory.mktemp("reports"))


@pytest.fixture(scope="session")
def picture_run(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """As `toy`, of `picture_run.run(out, ...)`: a task on one small set of pictures."""
    import picture_run

    run = _runner("picture_run", tmp_path_factory.mktemp("reports"))
    data = str(picture_run.draw(tmp_path_factory.mktemp("data") / "pictures"))
    return lambda out, **options: run(out, **{"data": data, **options})


@pytest.fixture(scope="session")
def vit_toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """As `toy`, of `vit_run.run(out, ...)`: a tiny ViT beside a teacher."""
    return _runner("vit_run", tmp_path_factory.mktemp("reports"))


def _runner(script: str, reports: Path) -> Toy:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["toy_run", "vit_run", "picture_run"])

    def run(out: Path, world: int = 1, **options: Any) -> tuple[int, dict[str, Any] | None]:
        target = __import__(script).run
        processes, files = [], [reports / f"{rank}.json" for rank in range(world)]
        port = free_port() if world > 1 else 0
        for rank, file in enumerate(files):
            file.unlink(missing_ok=True)
            mine = {**options, "report": str(file)}
            if world > 1:
                mine["environment"] = {
                    "LOCAL_RANK": str(rank),
                    "NODE_RANK": "0",
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                mine["trainer"] = {"devices": world, "strategy": "ddp", **options.get("trainer", {})}
            processes.append(context.Process(target=target, args=(str(out),), kwargs=mine))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", HERE, prepend=os.pathsep)
            for process in processes:
                process.start()
        for process in processes:
            process.join()
        report = json.loads(files[0].read_text()) if files[0].exists() else None
        return processes[0].exitcode or 0, report

    return run


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
