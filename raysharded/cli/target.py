"""The trainer that a file or module defines: `train.py`, `train.py:make`, `package.module:trainer`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from raysharded.cli.suggestions import close_to
from raysharded.errors import ConfigError, RayshardedError, TaskError
from raysharded.locations import PACKAGE_FOLDER, with_home
from raysharded.task import Task
from raysharded.trainer import ElasticTrainer

DEFAULT_NAME = "trainer"


def load_trainer(target: str, arguments: Sequence[str] = ()) -> ElasticTrainer:
    """Import `target` and return its trainer; a function is called with the arguments.

    Raises ConfigError if the target does not exist, and TaskError with the traceback if its code raises. The folder of
    the file, or the current one for a module, is put first on `sys.path`, as Python does for a script.
    """
    found = load_target(target, arguments)
    if not isinstance(found, ElasticTrainer):
        name = target.rpartition(":")[2]
        raise ConfigError(
            f"{target}: {name} is a task. Name a trainer, or give `raysharded run` its settings with --config."
        )
    return found


def load_target(target: str, arguments: Sequence[str] = ()) -> ElasticTrainer | Task | type[Task]:
    """As `load_trainer`, but the target may also be a task or a task's class."""
    found = _found(target)
    if isinstance(found, type) and issubclass(found, Task):
        return found
    if _is_function(found):
        found = _called(target, found, arguments)
    if not isinstance(found, (ElasticTrainer, Task)):
        _, name = _split(target)
        raise ConfigError(f"{target}: {name} gives {found!r:.80}, not a raysharded.ElasticTrainer. Return one from it.")
    return found


def takes_arguments(target: str) -> bool:
    """True if the target is a function with parameters. Raises as `load_target` does."""
    found = _found(target)
    if isinstance(found, type) or not _is_function(found):
        return False
    try:
        return bool(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # its signature is unknown
        return False


def _is_function(found: object) -> bool:
    return callable(found) and not isinstance(found, (ElasticTrainer, Task))


def _found(target: str) -> Any:
    """The target object itself."""
    where, name = _split(target)
    module = _import_file(target, Path(where)) if where.endswith(".py") else _import_module(target, where)
    if not hasattr(module, name):
        meant = close_to(name, [other for other in vars(module) if not other.startswith("_")])
        hint = f": did you mean {meant!r}?" if meant else "."
        raise ConfigError(
            f"{target}: {where} has no {name!r}{hint} Define a function `{name}()` that returns an ElasticTrainer, or "
            f"name another: {where}:NAME."
        )
    return getattr(module, name)


def _split(target: str) -> tuple[str, str]:
    where, separator, name = target.rpartition(":")
    if not separator or name.endswith(".py"):  # no name
        where, name = target, DEFAULT_NAME
    if not where or not name.isidentifier():
        raise ConfigError(f"{target!r} names no trainer. Give FILE.py, FILE.py:NAME or MODULE:NAME.")
    return where, name


def _import_file(target: str, file: Path) -> ModuleType:
    """Import a file under the name by which workers can import it."""
    file = Path(with_home(str(file))).resolve()
    if not file.is_file():
        raise ConfigError(f"{target}: there is no file {file}. Check the path.")
    module = _import(target, file.stem, file.parent)
    if module.__file__ is None or Path(module.__file__).resolve() != file:
        raise ConfigError(
            f"{target}: there is another module called {file.stem!r} ({module.__file__ or 'built in'}). "
            "Rename the file."
        )
    return module


def _import_module(target: str, name: str) -> ModuleType:
    try:
        return _import(target, name, Path(os.getcwd()))
    except TaskError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise ConfigError(
                f"{target}: there is no module {name!r} that can be imported from here. Give FILE.py or MODULE:NAME."
            ) from None
        raise


def _import(target: str, name: str, folder: Path) -> ModuleType:
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except RayshardedError:
        raise
    except Exception as error:  # noqa: BLE001  # the boundary to the user's code
        _blame(target, error)


def _called(target: str, function: Any, arguments: Sequence[str]) -> Any:
    try:
        return function(*arguments)
    except RayshardedError:
        raise
    except Exception as error:  # noqa: BLE001  # the boundary to the user's code
        _blame(target, error)


def _blame(target: str, error: Exception) -> NoReturn:
    """Raise a TaskError with the user's part of the traceback."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(
        (PACKAGE_FOLDER, "<frozen ", importlib.__file__)
    ):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    raise TaskError(f"{target} raised {type(error).__name__}: {error}", text) from error
