"""The workers' remarks about the task, kept until a check's end; and the log lines not to print meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from raysharded.ids import WorkerId


def prepare(folder: str, *, use_gpu: bool) -> Mapping[WorkerId, Callable[[], None]]:
    """The first action of each worker's process; the third worker replaces the second."""
    shown = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if number]
    gpus = [shown[index] if use_gpu and index < len(shown) else "" for index in (0, 1, 1)]
    return {WorkerId(worker): partial(_settle, folder, gpu) for worker, gpu in enumerate(gpus)}


def _settle(folder: str, gpu: str) -> None:
    """In a worker's process: keep its log and caches in the check's folder. `gpu`: the only visible one."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/compiled/triton"
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    log = logging.getLogger("raysharded")
    log.addHandler(_Remarks(_file(folder)))
    log.propagate = False


class _Remarks(logging.Handler):
    """Writes remarks about the task to a file that all workers share, and omits messages about workers."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.WARNING)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if not record.exc_info and not text.startswith("worker "):
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{text}\n")


def _file(folder: str) -> str:
    return f"{folder}/remarks.txt"


def remarks_in(folder: str) -> list[str]:
    """The remarks, each once."""
    path = Path(_file(folder))
    return list(dict.fromkeys(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context without raysharded's log lines of this process: the runs lose a worker on purpose."""
    log, handler = logging.getLogger("raysharded"), logging.NullHandler()
    propagated = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagated
