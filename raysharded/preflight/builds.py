"""A process's build of a task as text, and the first difference between two builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raysharded.config import EngineConfig
from raysharded.display.quantities import count
from raysharded.errors import TaskError
from raysharded.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """An inventory of a build that can be sent to another process."""

    kinds: tuple[str, ...]
    texts: tuple[str, ...]
    """Description of every item, in order."""
    drawn: tuple[str, ...]
    """Constants that the constructor draws: a run takes them from its first build."""

    @property
    def summary(self) -> str:
        """A summary for people."""
        parameters, buffers = self.kinds.count("parameter"), self.kinds.count("buffer")
        constants = self.kinds.count("constant")
        told = f"{count(parameters, 'parameter')}, {count(buffers, 'buffer')} and {count(constants, 'constant')}"
        if self.drawn:
            more = f" and {len(self.drawn) - 1} more" if self.drawn[1:] else ""
            told += f"; the constructor draws {self.drawn[0]!r}{more}, which travels with the state"
        return told


def build_of(task: Task, engine: EngineConfig, threads: int, seed: int) -> Build:
    """Build the model without memory, as a worker does, and the optimizer's groups. Run it in a separate process.

    Raises the engine's errors for unsupported models, and TaskError for the task's errors.
    """
    from raysharded.actors.model.build import build_on_meta
    from raysharded.actors.model.constants import constants_of, differing
    from raysharded.actors.model.construction import construct
    from raysharded.actors.model.inventory import group_items, inventory_of
    from raysharded.actors.model.sharded_model import clean_name
    from raysharded.actors.optimizer.built_optimizer import made_by
    from raysharded.actors.process.environment import prepare_torch
    from raysharded.actors.task_calls.task_errors import naming

    prepare_torch(replace(engine, compile=False), threads, use_gpu=False)
    with naming(f"{type(task).__name__}.build_model", "build"):
        built = build_on_meta(task, engine, seed)
        again = construct(task, seed + 1)
    inventory = inventory_of(task, built)
    drew = inventory.drew or again.drew
    drawn = differing(constants_of(again.model, with_numbers=drew), inventory.constants)
    own = items = list(inventory.items_without(drawn))
    names = {id(param): clean_name(name) for name, param in built.model.named_parameters()}
    try:
        items = [*own, *group_items(made_by(task, built.model).param_groups, names)]
    except TaskError as error:
        if error.__cause__ is None:  # a refusal, not an error of the method
            raise
        items = own
    except Exception:  # noqa: BLE001 - parameters have no values here: the runs report the optimizer's errors
        items = own
    return Build(
        kinds=tuple(item.kind for item in items), texts=tuple(item.text for item in items), drawn=tuple(sorted(drawn))
    )


def receive(*_: object) -> None:
    """Do nothing with what was sent to this process: that it could be read is the test."""


def difference(task: str, builds: Sequence[Build]) -> str:
    """The first difference between two processes' builds, with its usual cause; empty if there is none."""
    from raysharded.actors.model.inventory import told_apart

    one, other = builds
    for place in range(max(len(one.texts), len(other.texts))):
        texts = [build.texts[place] if place < len(build.texts) else "nothing" for build in builds]
        if texts[0] != texts[1]:
            kinds = one.kinds if place < len(one.kinds) else other.kinds
            return told_apart(task, kinds[place], ("one process", texts[0]), ("another", texts[1]))
    return ""
