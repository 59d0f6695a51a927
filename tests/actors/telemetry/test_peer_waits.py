"""Waits for peers are reported by marks on functions: no call that blocks is without one, or without a reason."""

from __future__ import annotations

import ast
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raysharded
from raysharded.actors.device.device_waits import marked_functions, waits_for_peers
from raysharded.actors.telemetry.stack_probe import is_of_standard_library, is_waiting

LIBRARY = Path(raysharded.__file__).parent
FILES = [*LIBRARY.glob("actors/**/*.py"), *LIBRARY.glob("orphans/*.py"), LIBRARY / "ray_backend" / "peers.py"]
"""Modules that run in a worker."""
BLOCKING = {
    "wait",
    "join",
    "result",
    "acquire",
    "deliver",
    "barrier",
    "multi_get",
    "synchronize",
    "eager_connect_single_device",
    "ProcessGroupGloo",
    "TCPStore",
    "init_process_group",
    "all_to_all_single",
}
"""Names of functions and methods that return when another thread or process has done something."""
LOCAL = "something of this process: a copy, a lock, another thread, or storage"
INSIDE = "a function with the mark, which it calls"
TORCH = "torch's own frame, which is known by its folder"
LAUNCHER = "the thread that computes: a launcher calls it in another one"
WITHOUT_THE_MARK = {
    "Communicators.abort": LOCAL,
    "Cuda.all_to_all": TORCH,
    "Engine._calling_the_task": LOCAL,
    "Engine._prepare": INSIDE,
    "Engine.settle": LOCAL,
    "FunctionThread.build": "the user's function, in another thread",
    "FunctionThread.finish": "the user's function, at the end of the run",
    "FunctionThread.train": LAUNCHER,
    "Groups._register": TORCH,
    "HangupWatch.close": LOCAL,
    "RayPeers.ask": "other orphans, in a thread that does not compute",
    "PinnedArena._add_coming": LOCAL,
    "Saver._is_begun": LOCAL,
    "Saver._written": LOCAL,
    "Saver.wait_until_idle": LOCAL,
    "ShardBuffer.wait": LOCAL,
    "Steps.commit_last": INSIDE,
    "Steps.join_copies": INSIDE,
    "StoreClient.close": "nobody: it does not block",
    "TaskThread.train": LAUNCHER,
    "copy_bytes": LOCAL,
    "Worker._get_ready": LAUNCHER,
    "Worker.form": LAUNCHER,
    "Worker.report": LAUNCHER,
    "Worker.rest": LAUNCHER,
    "Worker.save_held": LAUNCHER,
    "Worker.write_part": LAUNCHER,
    "_InThread.wait": LOCAL,
    "_OnStream.wait": LOCAL,
    "_Piece.finish": INSIDE,
    "_Rebuilding.run": INSIDE,
    "_Round._encode": INSIDE,
    "_Round._run": INSIDE,
    "_Test._all_have_come": "a coroutine of a thread that does not compute",
    "_Transfer._run": INSIDE,
    "_mesh_of_one": TORCH,
    "_pass_on": INSIDE,
    "drain": LOCAL,
    "moving_memory": INSIDE,
    "require_descriptors": LOCAL,
    "restore": INSIDE,
    "serve": INSIDE,
    "write_orphan_checkpoint": LOCAL,
}
"""Function -> its other reason to wait, or the place of its mark."""


def blocking_calls() -> Iterator[tuple[str, str]]:
    """The qualified name of each function in a worker with such a call, and the call's name."""

    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from walk(child, (*path, child.name))
                continue
            if isinstance(child, ast.Call):
                called = child.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                is_text = name == "join" and (
                    isinstance(called, ast.Attribute)
                    and (isinstance(called.value, ast.Constant) or ast.unparse(called.value) == "os.path")
                )
                if name in BLOCKING and not is_text:
                    yield ".".join(path), name
            yield from walk(child, path)

    for file in sorted(FILES):
        yield from walk(ast.parse(file.read_text()), ())


def test_every_call_that_blocks_is_in_a_function_with_the_mark_or_with_a_reason() -> None:
    for file in FILES:
        importlib.import_module(
            ".".join(file.relative_to(LIBRARY.parent).with_suffix("").parts).removesuffix(".__init__")
        )
    marked = {name for file, name in marked_functions() if Path(file).is_relative_to(LIBRARY)}
    without = {function for function, _ in blocking_calls()} - marked
    assert without == WITHOUT_THE_MARK.keys(), "mark each with waits_for_peers, or say here what it waits for"


@waits_for_peers
def waits_here(event: threading.Event) -> None:
    event.wait()


def computes(event: threading.Event) -> None:
    event.wait()


def begins(event: threading.Event) -> None:
    """Has the mark's function below it on the stack, and runs elsewhere."""

    @waits_for_peers
    def outer() -> None:
        computes(event)

    outer()


@pytest.mark.parametrize(("function", "waits"), [(waits_here, True), (computes, False), (begins, False)])
def test_a_thread_waits_if_its_innermost_function_has_the_mark(
    function: Callable[[threading.Event], None], waits: bool
) -> None:
    event = threading.Event()
    thread = threading.Thread(target=function, args=(event,))
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while _name_of_innermost(thread) != "wait":
            assert time.monotonic() < deadline
        assert is_waiting(thread.ident) is waits
    finally:
        event.set()
        thread.join()


def _name_of_innermost(thread: threading.Thread) -> str:
    return sys._current_frames()[thread.ident or 0].f_code.co_name


@pytest.mark.parametrize(
    ("file", "is_pythons"),
    [
        ("/opt/conda/lib/python3.11/threading.py", True),
        ("/opt/conda/lib/python3.11/concurrent/futures/_base.py", True),
        ("/opt/conda/lib/python3.11/site-packages/raysharded/actors/engine.py", False),
        ("/opt/conda/lib/python3.11/site-packages/torch/nn/modules/linear.py", False),
        ("/opt/conda/lib/python3.11/dist-packages/torch/nn/modules/linear.py", False),
        ("/opt/conda/lib/python3.11.zip/threading.py", False),
        ("/home/me/train.py", False),
    ],
)
def test_installed_packages_are_not_pythons_own_where_there_is_no_environment(file: str, is_pythons: bool) -> None:
    assert is_of_standard_library(file, "/opt/conda/lib/python3.11") is is_pythons
