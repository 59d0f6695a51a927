"""A program whose last line is a save in the background: `python last_save.py FOLDER HOW...`. Every write takes a
while.

Each HOW is a separate process, forked after the imports, whose output is in FOLDER/HOW.err. Python ends it as any
program; the first process prints the exit statuses.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

from raysharded import checkpoint
from raysharded.checkpoint.interop import RayshardedWriter
from raysharded.checkpoint.storage import BytesLike
from raysharded.checkpoint.storage.local import LocalStorage

_WRITE_S = 0.5

_write = LocalStorage.write


def write_slowly(self: LocalStorage, key: str, parts: Iterable[BytesLike]) -> None:
    time.sleep(_WRITE_S)
    _write(self, key, parts)


def save_later(folder: Path) -> None:
    """Save after the program's last line."""
    while threading.main_thread().is_alive():
        time.sleep(0.05)
    checkpoint.AsyncSaver().save(folder, {"w": torch.arange(11)}, step=10)


def main(folder: Path, how: str) -> None:
    LocalStorage.write = write_slowly  # type: ignore[method-assign]
    if how in ("fails", "closes", "beside"):
        folder.write_text("a file is in the way")
        folder = folder / "below"
    saver, other = checkpoint.AsyncSaver(), checkpoint.AsyncSaver()
    pending = saver.save(folder / "last", {"w": torch.arange(1000)}, step=7)
    match how:
        case "exit":
            sys.exit(3)
        case "raises":
            raise RuntimeError("as a program ends")
        case "forgets":
            del saver, pending
        case "closes":
            saver.close()
        case "beside":
            saver.close()
            other.save(folder.parent.with_suffix(".average"), {"w": torch.arange(1000)}, step=7).result()
        case "goes on":
            threading.Thread(target=lambda: save_later(folder / "thread")).start()
            atexit.register(lambda: checkpoint.AsyncSaver().save(folder / "atexit", {"w": torch.arange(9)}, step=8))
            async_save({"w": torch.arange(10)}, storage_writer=RayshardedWriter(folder / "torch-9"))


def each_in_a_fork(folder: Path, ways: list[str]) -> str | None:
    """The way of this process, which has been forked; in the first process None, when all others have ended."""
    gc.freeze()  # the imports, which no fork has to scan at its end
    started = {}
    for how in ways:
        process = os.fork()
        if process == 0:
            errors = os.open(folder / f"{how}.err", os.O_CREAT | os.O_WRONLY)
            os.dup2(errors, 1)
            os.dup2(errors, 2)
            return how
        started[how] = process
    ended = {how: os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for how, process in started.items()}
    sys.stdout.write(json.dumps(ended))
    return None


if __name__ == "__main__":
    way = each_in_a_fork(Path(sys.argv[1]), sys.argv[2:])
    if way is not None:
        main(Path(sys.argv[1]) / way, way)
