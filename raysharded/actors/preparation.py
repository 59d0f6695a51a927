"""Background preparation of the next generation by a worker: groups connected, nodes of the model wrapped.

An unused preparation costs only time. A worker that trains has built its model, and no code of the task runs here. One
that joins builds it first: no other thread may call the task's code meanwhile. Constructors draw from torch's global
generator, and may change settings of the whole process. Nodes have no memory until they are taken.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.comm.device_mesh import forget
from raysharded.actors.comm.groups import Groups, Rendezvous
from raysharded.actors.model.build import Wrapped, wrap
from raysharded.actors.process.environment import use_threads
from raysharded.errors import CollectiveAborted, StaleGeneration, text_of
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.job import Job
from raysharded.protocol.messages import GenerationSpec
from raysharded.task import has_tensor_parallelism

_log = logging.getLogger("raysharded.worker")


class Preparations:
    """The preparation that was requested last of one worker."""

    def __init__(self, job: Job, task_calls: threading.Lock, objects: BuiltObjects) -> None:
        """`task_calls`: the lock that a thread holds while it calls the task's code. `objects`: those of the worker."""
        self._job, self._task_calls, self._objects = job, task_calls, objects
        self._changing = threading.Lock()
        self._newest: Preparation | None = None
        self._formed = GenerationId(0)
        self._attempt = (GenerationId(0), 0)
        """(generation, attempt) of the latest preparation."""

    def make(self, generation: GenerationId, where: Rendezvous, attempt: int = 0, build_seed: int = 0) -> None:
        """Prepare a generation; discard the preparation of another one, or of an earlier attempt.

        Raises StaleGeneration for an outdated generation or attempt; otherwise as `Preparation.make`. Any thread.
        """
        preparation = Preparation(self._job, where, self._task_calls, build_seed, self._objects)
        with self._changing:
            if generation <= self._formed:
                raise StaleGeneration(f"generation {generation} was to be prepared after {self._formed}")
            if (generation, attempt) < self._attempt:
                raise StaleGeneration(f"attempt {attempt} to prepare generation {generation} came after a later one")
            self._attempt = (generation, attempt)
            before, self._newest = self._newest, preparation
        if before is not None:
            before.discard()
        preparation.make(lambda: use_threads(self._job.num_threads))

    def try_to_make(self, worker: WorkerId, spec: GenerationSpec, where: Rendezvous) -> str:
        """As `make`; returns the error in words, if there is one: a generation is formed without a preparation, too.

        Raises StaleGeneration. `worker`: this worker, for the log.
        """
        try:
            self.make(spec.generation, where, spec.attempt, spec.build_seed)
        except StaleGeneration:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary of an optional action
            text = f"{type(error).__name__}: {text_of(error)}"
            _log.warning("worker %s could not prepare generation %s: %s", worker, spec.generation, text)
            return text
        return ""

    def begin_forming(self, generation: GenerationId) -> None:
        """Reject preparations of this generation and older ones from now on. Any thread."""
        with self._changing:
            self._formed = max(self._formed, generation)

    def take(self, prefix: str) -> tuple[Groups, Wrapped | None] | None:
        """The groups and the nodes prepared at this rendezvous; discards any other preparation."""
        with self._changing:
            preparation, self._newest = self._newest, None
        if preparation is None:
            return None
        if preparation.prefix == prefix:
            return preparation.take()
        preparation.discard()
        return None


class Preparation:
    """One attempt. `make` runs in a separate thread; any thread may `discard` the attempt until it is taken."""

    def __init__(
        self,
        job: Job,
        where: Rendezvous,
        task_calls: threading.Lock,
        build_seed: int,
        objects: BuiltObjects,
    ) -> None:
        """`task_calls`: the lock for calls of the task's code; `build_seed`: the seed of the run's constructors.
        `objects`: those of the worker."""
        self._job, self._where, self._task_calls, self._build_seed = job, where, task_calls, build_seed
        self._objects = objects
        self._groups = Groups(job.use_gpu)
        self._wrapped: Wrapped | None = None
        self._changing = threading.Lock()
        self._is_made = self._is_discarded = False

    @property
    def prefix(self) -> str:
        """The rendezvous's prefix."""
        return self._where.prefix

    def make(self, begin: Callable[[], None]) -> None:
        """Connect and build; `begin` is called first, in the thread that builds.

        Raises the error that occurred, or `CollectiveAborted` after `discard`; both free everything made so far.
        """
        try:
            begin()
            self._groups.connect_beside(self._where)
            self._wrapped = self._wrap()
        except BaseException:
            self.discard()
            raise
        finally:
            with self._changing:
                self._is_made = True
                discarded = self._is_discarded
            if discarded:
                self._groups.close()
            forget()
        if discarded:
            raise CollectiveAborted(f"{self.prefix} is not wanted any more")

    def _wrap(self) -> Wrapped | None:
        """Nodes of the model, wrapped; builds the model in a worker that has none.

        None for a task whose parallel styles need torch's default group, for compiled blocks, and for whole units.
        """
        job = self._job
        if has_tensor_parallelism(job.task):
            return None
        with self._task_calls:
            if self._groups.aborted:
                raise CollectiveAborted(f"{self.prefix} is not wanted any more")
            units = self._objects.units(None, self._build_seed)
        if job.engine.compile or units.whole:  # the training thread compiles; a group of one needs the default group
            return None
        return wrap(units, job.engine, self._groups.axes())

    def take(self) -> tuple[Groups, Wrapped | None] | None:
        """The groups and the nodes, which the caller owns from now on; None if unfinished or discarded."""
        with self._changing:
            made = self._is_made and not self._is_discarded
        return (self._groups, self._wrapped) if made else None

    def discard(self) -> None:
        """Free the preparation, finished or not. Idempotent."""
        self._groups.abort()
        with self._changing:
            already, self._is_discarded = self._is_discarded, True
            made = self._is_made
        if made and not already:
            self._groups.close()
