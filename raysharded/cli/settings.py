"""A run's settings: the command line over a file over the trainer's code; or those of a task without a trainer.

    task: {layers: 6, width: 256}          # arguments of the task's class
    data: {paths: corpus/, seq_len: 128}   # of raysharded.TokenDataset; with `packing`, of raysharded.PackedDataset
    batch: {global_batch_size: 16, microbatch_size: 2}
    scaling: {num_workers: [2, 8]}
    run: {name: gpt, storage_path: runs, max_steps: 1000, checkpoint: {every_steps: 100}}

Every other name is a field of the configuration class of its section.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raysharded import config
from raysharded.cli.option_names import translated, unquoted
from raysharded.cli.suggestions import close_to
from raysharded.errors import ConfigError
from raysharded.locations import require_file, with_home
from raysharded.task import Task
from raysharded.trainer import ElasticTrainer

Settings = dict[str, Any]
SECTIONS: dict[str, type] = {
    "batch": config.BatchConfig,
    "scaling": config.ScalingConfig,
    "run": config.RunConfig,
    "engine": config.EngineConfig,
    "evaluation": config.EvalConfig,
}
NESTED: dict[str, type] = {
    "run.checkpoint": config.CheckpointConfig,
    "run.failure": config.FailureConfig,
    "engine.redundancy": config.Redundancy,
}
"""Fields that are configurations themselves."""
_FREE = ("task", "data", "evaluation.data")
"""Sections whose names are a constructor's parameters."""
_NEEDED = ("data", "batch", "scaling", "run")
"""The settings that a task needs in addition."""
TUPLES: dict[str, str] = {
    "scaling.num_workers": "2,8",
    "run.checkpoint.keep_best": "loss,min,1",
    "run.failure.preemption_notices": "aws,gcp",
    "engine.redundancy.parity": "4,1",
}
"""Settings whose value is a tuple, each with an example for the command line."""


def known_names() -> list[str]:
    """Every setting with a fixed name, with dots."""
    sections = {**SECTIONS, **NESTED}
    return [f"{section}.{field.name}" for section, kind in sections.items() for field in dataclasses.fields(kind)]


def read_settings(path: str | None, overrides: Sequence[str]) -> Settings:
    """The file's settings, overridden by `overrides` (`batch.global_batch_size=32`).

    Raises ConfigError for a file or value that cannot be read, and for unknown names, with the nearest known one.
    """
    settings = {} if path is None else _read_file(Path(with_home(path)))
    for name in _flat(settings):
        _check_name(name, path or "")
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"{override!r} is an invalid setting: give SECTION.FIELD=VALUE, as batch.global_batch_size=32."
            )
        _check_name(name, f"setting {override}")
        _put(settings, name.split("."), _value_of(name, text), override)
    return settings


def apply(found: ElasticTrainer | Task | type[Task], settings: Settings) -> ElasticTrainer:
    """A copy of the trainer with the settings applied, or a new trainer for a task. Raises ConfigError, which speaks of
    settings; `found` is unchanged."""
    if not settings and isinstance(found, ElasticTrainer):
        return found
    try:
        return _applied(found, settings)
    except ConfigError as error:
        raise ConfigError(_in_settings(str(error))) from error


def _applied(found: ElasticTrainer | Task | type[Task], settings: Settings) -> ElasticTrainer:
    if isinstance(found, ElasticTrainer):
        if "task" in settings:
            raise ConfigError("task: the target is a trainer, which has its task. Give a Task's class as the target.")
        return _changed(found, settings)
    missing = [name for name in _NEEDED if name not in settings]
    if missing:
        raise ConfigError(
            f"the target is a task: it needs the settings {', '.join(missing)} as well. Give them with --config, or "
            "name a trainer."
        )
    task = found
    if isinstance(task, type):
        task = _made(task, settings.get("task", {}), "task")
    elif "task" in settings:
        raise ConfigError("task: the target is a task that is made already. Give its class as the target.")
    parts = {name: _configured(name, None, settings[name]) for name in SECTIONS if name in settings}
    return ElasticTrainer(task=task, data=_data(settings["data"], "data"), **parts)


def _in_settings(message: str) -> str:
    """The message of a configuration class, with settings instead of its fields."""
    section = {kind.__name__: name for name, kind in (SECTIONS | NESTED).items()}.get(re.split("[.: ]", message)[0])
    if section is None:
        return message
    fields = [field.name for field in dataclasses.fields((SECTIONS | NESTED)[section])]
    told = translated(message, {name: partial(_setting, f"{section}.{name}") for name in fields})
    kind = (SECTIONS | NESTED)[section].__name__
    return f"{section}{told.removeprefix(kind)}" if told.startswith(kind) else f"{told}{_example(told)}"


def _example(told: str) -> str:
    """A tuple as one types it, behind a message that needs one."""
    name, _, advice = told.partition(": ")
    name = name.partition("=")[0]
    return (
        f" On the command line: {name}={TUPLES[name]}."
        if name in TUPLES and re.match(r"give .*(\(|tuple)", advice)
        else ""
    )


def _setting(name: str, text: str) -> str:
    return f"{name}={unquoted(text)}"


def _changed(trainer: ElasticTrainer, settings: Settings) -> ElasticTrainer:
    parts: dict[str, Any] = {name: getattr(trainer, name) for name in ("task", "data", *SECTIONS)}
    for name, values in settings.items():
        parts[name] = _data(values, "data") if name == "data" else _configured(name, parts[name], values)
    ElasticTrainer(**parts)  # checks the combination
    changed = copy.copy(trainer)  # a subclass may have another constructor
    for name, value in parts.items():
        setattr(changed, name, value)
    return changed


def _configured(section: str, before: Any, values: Any) -> Any:
    """A configuration with changed values; `before` is None if there was none."""
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section}={values!r}: give its fields, as {section}: {{...}}.")
    kind = {**SECTIONS, **NESTED}[section]
    annotations = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{section}.{name}"
        if path in NESTED:
            changes[name] = _configured(path, getattr(before, name, None), value)
        elif path in _FREE:
            changes[name] = _data(value, path)
        else:
            changes[name] = tuple(value) if isinstance(value, list) and "tuple" in annotations[name] else value
    return kind(**changes) if before is None else dataclasses.replace(before, **changes)


def _data(values: Any, where: str) -> Any:
    from raysharded.data import PackedDataset, TokenDataset

    is_packed = isinstance(values, Mapping) and "packing" in values
    return _made(PackedDataset if is_packed else TokenDataset, values, where)


def _made(kind: type, values: Any, where: str) -> Any:
    """An instance of a class from its arguments by name."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}={values!r}: give the arguments of {kind.__name__} by name.")
    parameters = inspect.signature(kind).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in values.keys() - set(names):
            raise ConfigError(_no_such(f"{where}.{name}", [f"{where}.{known}" for known in names]))
    missing = [p.name for p in parameters if p.name in names and p.default is p.empty and p.name not in values]
    if missing:
        raise ConfigError(f"{kind.__name__} needs {', '.join(f'{where}.{name}' for name in missing)}.")
    return kind(**values)


def _check_name(name: str, where: str) -> None:
    inside_free = any(name == free or name.startswith(f"{free}.") for free in _FREE)
    known = known_names()
    if not inside_free and name not in known and name not in SECTIONS:
        raise ConfigError(f"{where}: {_no_such(name, [*known, *_FREE])}" if where else _no_such(name, known))


def _no_such(name: str, known: list[str]) -> str:
    meant = close_to(name, known)
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == name.rpartition(".")[0]]
    if meant:
        return f"there is no setting {name}: did you mean {meant}?"
    if siblings and "." in name:
        return f"there is no setting {name}: {name.rpartition('.')[0]} has {', '.join(siblings)}."
    return f"there is no setting {name}: the sections are {', '.join(['task', 'data', *SECTIONS])}."


def _flat(settings: Any, above: str = "") -> list[str]:
    """The names with dots of all values; a section with free names is one value."""
    names: list[str] = []
    for name, value in settings.items():
        path = f"{above}{name}"
        is_section = path in SECTIONS or path in NESTED
        names += _flat(value, f"{path}.") if is_section and isinstance(value, Mapping) else [path]
    return names


def _put(settings: Settings, path: list[str], value: Any, override: str) -> None:
    *above, last = path
    for name in above:
        inner = settings.setdefault(name, {})
        if inner is None:
            inner = settings[name] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"setting {override}: {name} is {inner!r} in the file, which has no fields.")
        settings = inner
    settings[last] = value


def _value(text: str) -> Any:
    """The text parsed as JSON if valid, else the text; `None`, `True` and `False` as in Python."""
    if text == "None":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _value_of(name: str, text: str) -> Any:
    """The value of a setting; one that may be a tuple is also read from `1,2` and `(1, 2)`, as a list."""
    value = _value(text)
    if name not in TUPLES or not isinstance(value, str):
        return value
    inner = value.strip()
    is_closed = inner[:1] + inner[-1:] in ("()", "[]")
    if not is_closed and "," not in inner and name != "run.failure.preemption_notices":  # of any length
        return value
    items = (inner[1:-1] if is_closed else inner).split(",")
    return [
        unquoted(item) if isinstance(item, str) else item for item in map(_value, map(str.strip, items)) if item != ""
    ]


def _read_file(path: Path) -> Settings:
    try:
        require_file(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}. Check the path.") from error
    try:
        settings = _parsed(path, text)
    except ValueError as error:
        raise ConfigError(f"--config {path} is not well formed: {' '.join(str(error).split())}. Fix it.") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {path} has {type(settings).__name__} instead of sections: batch, scaling, run.")
    return settings


def _parsed(path: Path, text: str) -> Any:
    """The settings of a file. Raises ValueError."""
    match path.suffix.lower():
        case ".json":
            return json.loads(text)
        case ".toml":
            import tomllib

            return tomllib.loads(text)
        case ".yaml" | ".yml":
            import yaml

            try:
                return yaml.safe_load(text) or {}
            except yaml.YAMLError as error:
                raise ValueError(str(error)) from error
    raise ConfigError(f"--config {path}: give a file that ends in .yaml, .yml, .toml or .json.")
