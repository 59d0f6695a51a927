"""The model and the optimizer of one worker's process: the same Python objects in every generation of workers.

A task with tensor parallelism is the exception: torch's parallel styles leave hooks and tensors of one mesh on the
modules, and nothing undoes them. Its model and optimizer are built anew for every generation. So are those of a task
whose optimizer holds parameters outside its groups.
"""

from __future__ import annotations

import torch

from raysharded.actors.comm.device_mesh import DeviceMeshes
from raysharded.actors.model.build import Units, Wrapped, allocate, build_units_of, wrap
from raysharded.actors.model.construction import Construction
from raysharded.actors.model.modes import Modes
from raysharded.actors.model.sharded_model import ShardedModel
from raysharded.actors.optimizer.built_optimizer import BuiltOptimizer
from raysharded.actors.optimizer.held_parameters import refuse_use
from raysharded.actors.optimizer.loaded_state import TriedOptimizer
from raysharded.actors.optimizer.registered_state import RegisteredState
from raysharded.actors.task_calls.plain_attributes import PlainAttributes
from raysharded.actors.task_calls.process_state import Left
from raysharded.config import EngineConfig
from raysharded.data import Loader
from raysharded.data.streams.own_microbatches import OwnMicrobatches
from raysharded.task import Task, has_tensor_parallelism


class BuiltObjects:
    """A task's model and optimizer in this process. One thread at a time; `release`: training thread."""

    def __init__(self, task: Task, config: EngineConfig, run_data: Loader | None = None) -> None:
        """`run_data`: the run's own data, for a session that compares others with them."""
        self._task, self._config, self.run_data = task, config, run_data
        self._units: Units | None = None
        self._sharded: ShardedModel | None = None
        self._modes: Modes | None = None
        self.optimizer: BuiltOptimizer | None = None
        """None until the first generation."""
        self.optimizer_left = Left()
        """Settings of the process that `build_optimizer` left changed."""
        self.tried: TriedOptimizer | None = None
        """Result of the trial of the optimizer, also of one that is built anew."""
        self.registered: RegisteredState | None = None
        """State that goes back with the step; None unless a session owns the loop."""
        self._own_data: OwnMicrobatches | None = None
        self._task_attributes: PlainAttributes | None = None
        self._model_attributes: PlainAttributes | None = None

    def units(self, axes: DeviceMeshes | None, seed: int) -> Units:
        """The model's units; builds the model if it is not built. Call it where the task's code may be called.

        `axes`: may be None if the task has no tensor parallelism; `seed`: the seed of the run's constructors.
        """
        if self._units is None:
            self._units = build_units_of(self._task, self._config, axes, seed)
        return self._units

    def adopt(
        self,
        built: Construction,
        optimizer: BuiltOptimizer,
        registered: RegisteredState,
        own_data: OwnMicrobatches | None,
        seed: int,
    ) -> None:
        """Take over what a session has built, in place of what an earlier one has. Raises as `build_units_of`.

        `own_data`: the loader of the session's own microbatches, if it reads them itself.
        """
        self.release()
        if self._own_data is not None:
            self._own_data.close()
        self._own_data = own_data
        self._modes = self.tried = self._model_attributes = None
        self._units = build_units_of(self._task, self._config, None, seed, built)
        self.optimizer, self.registered = optimizer, registered

    def loader(self, data: Loader) -> Loader:
        """The loader of the microbatches: of the run's data, or that of the session over it."""
        return data if self._own_data is None else self._own_data.over(data)

    def attach(self, prepared: Wrapped | None, axes: DeviceMeshes, seed: int, device: torch.device) -> ShardedModel:
        """The model with memory for this generation, also in the optimizer's groups, if that is built.

        `prepared`: the model's nodes, if they are wrapped already.
        """
        units = self.units(axes, seed)
        if prepared is None or prepared.units is not units:
            prepared = wrap(units, self._config, axes)
        self._sharded = allocate(prepared, device)
        if self.optimizer is not None:
            self.optimizer.exchange(self._sharded.parameters)
        return self._sharded

    def modes(self, number: int) -> Modes:
        """The modes that the model's modules were built with. `number`: the rule's number."""
        if self._modes is None:
            assert self._units is not None
            self._modes = Modes(self._units.model, number)
        return self._modes

    def attributes(self) -> tuple[PlainAttributes, PlainAttributes]:
        """The attributes of the task and the model as the first generation with them found them."""
        if self._task_attributes is None:
            assert self._units is not None
            modules = [*self._units.model.modules()]
            self._task_attributes = PlainAttributes({"self": self._task}, of_model=modules, code=[self._task, *modules])
        return self._task_attributes, *self.attributes_of_model()

    def attributes_of_model(self) -> tuple[PlainAttributes]:
        """As `attributes`, without those of the task."""
        assert self._units is not None
        if self._model_attributes is None:
            modules = self._units.model.named_modules()
            self._model_attributes = PlainAttributes({f"model.{name}".rstrip("."): one for name, one in modules})
        return (self._model_attributes,)

    def release(self) -> None:
        """End a generation: free the memory of parameters and optimizer state, and forget all that knew it.

        Idempotent. The next generation is attached to the same objects, or to new ones with tensor parallelism.
        """
        sharded, self._sharded = self._sharded, None
        anew = has_tensor_parallelism(self._task)
        former = [] if sharded is None else [*sharded.parameters.values()]
        if sharded is not None and self.registered is not None and self.optimizer is not None:
            self.optimizer.former.note(sharded.parameters)
        if self.optimizer is not None and self._units is not None:
            former += [param for held in self.optimizer.parts.lists for param in held] if former else []
            self.optimizer.release(self._units.parameters)
            anew = anew or self.optimizer.holds_elsewhere is not None
        if sharded is not None:
            sharded.release()
        if self.registered is not None:
            refuse_use(former, "of an earlier generation of workers")
        if anew:
            self._units = self._modes = self.optimizer = self._model_attributes = None
