"""A launcher that makes each worker a plain local process: the real engine and the real driver, without Ray.

Processes are forked from a server that has already imported torch, so that one starts in milliseconds. A worker exits
when its launcher has exited.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import platform
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Protocol

from raysharded.actors.process.death_watch import DeathWatch
from raysharded.actors.telemetry import position_record
from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.ownership.run_folder import run_storage
from raysharded.protocol.death import DeathExplained
from raysharded.protocol.job import Job
from raysharded.protocol.messages import WorkerInfo
from raysharded.protocol.session import DriverSession, FoundWorkers
from raysharded.protocol.worker_launcher import Happened, LeadershipCheck, Reply, WorkerLost
from raysharded.rendezvous.server import RendezvousStore
from raysharded.run.spec import sent_objects
from raysharded.testing import network

if TYPE_CHECKING:
    from raysharded.protocol.worker_launcher import Launcher
    from raysharded.run import Listener, Result, Run

_IMPORTED_MAIN = {"init_main_from_name", "init_main_from_path"}
"""Keys of multiprocessing's preparation of a process if that imports the main module, which is a file or a module."""
_PRELOADED = ["raysharded.testing.preloaded"]


class ProcessLauncher:
    """Implements `raysharded.protocol.worker_launcher.Launcher` with local processes."""

    def __init__(
        self, job: Job, *, host: str = "127.0.0.1", prepare: Mapping[WorkerId, Callable[[], None]] | None = None
    ) -> None:
        """`host`: the address of this process for the workers. `prepare`: the first action of a worker's process, for
        example to enter a separate network."""
        self._job, self._host, self._prepare = job, host, prepare or {}
        self._identity = ""
        """The identity of the run's folder, once the driver has acquired the run."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._processes: dict[WorkerId, Any] = {}
        self._pipes: dict[WorkerId, Connection] = {}
        self._unreachable: dict[WorkerId, tuple[Any, Connection]] = {}
        """Workers that are cut off."""
        self._store: RendezvousStore | None = None
        self._deaths = DeathWatch()

    def rendezvous(self) -> tuple[str, int]:
        if self._store is None:
            self._store = RendezvousStore(self._host)
        return self._host, self._store.port

    def secret(self, prefix: str) -> bytes:
        assert self._store is not None
        return self._store.secret(prefix)

    def where(self) -> tuple[str, str]:
        return "", ""

    def has_ended(self, cluster: str, job: str) -> bool:
        return False

    def of_another_version(self) -> None:
        return None

    def enter(self, terms: DriverSession, hold: LeadershipCheck) -> FoundWorkers:
        self._identity = terms.identity
        return FoundWorkers()  # no worker outlives its launcher

    def abandon(self) -> None:
        self.close()

    def start(self, worker: WorkerId, avoid: tuple[str, ...] = ()) -> None:
        if platform.node() in avoid or worker in self._processes:  # there is no other node: it would wait for one
            return
        ours, theirs = self._context.Pipe()
        prepare = self._prepare.get(worker)
        given = (worker, _pickled(self._job), theirs, prepare, self._identity)
        process = self._context.Process(target=_serve_pickled, args=given, daemon=True)
        process.start()
        theirs.close()
        self._processes[worker], self._pipes[worker] = process, ours
        self.call(worker, "ready")

    def call(self, worker: WorkerId, method: str, *args: Any) -> None:
        pipe = self._pipes.get(worker)
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `wait` will detect that it has exited
                pipe.send((method, args))

    def kill(self, worker: WorkerId, *, at_once: bool = True) -> None:
        process, pipe = self._processes.pop(worker, None), self._pipes.pop(worker, None)
        if process is not None and pipe is not None:
            self._deaths.forget(process.pid)
            pipe.close()
            process.kill()
            process.join()

    def pid(self, worker: WorkerId) -> int:
        """A worker's process id, for tests that harm it from outside."""
        return int(self._processes[worker].pid)

    def cut(self, worker: WorkerId) -> None:
        """Carry nothing to or from a worker any more: neither calls nor replies, nor a kill. The worker keeps
        running."""
        self._unreachable[worker] = self._processes.pop(worker), self._pipes.pop(worker)

    def end_unreachable(self) -> None:
        """End the workers that were cut off."""
        while self._unreachable:
            _, (process, pipe) = self._unreachable.popitem()
            pipe.close()
            process.kill()
            process.join()

    def wait(self, timeout_s: float) -> list[Happened]:
        if not self._pipes:
            threading.Event().wait(timeout_s)
            return []
        workers = {pipe: worker for worker, pipe in self._pipes.items()}
        happened: list[Happened] = []
        for pipe in wait(list(workers), timeout_s):
            assert isinstance(pipe, Connection)
            worker = workers[pipe]
            try:
                while pipe.poll():
                    happened.append(pipe.recv())
                    facts = getattr(happened[-1], "value", None)
                    if isinstance(facts, WorkerInfo):
                        self._deaths.watch(facts.pid, facts.started, facts.device)
            except (EOFError, ConnectionResetError):
                process = self._processes[worker]
                process.join()
                happened.append(
                    WorkerLost(worker=worker, reason=f"process {process.pid} ended with exit code {process.exitcode}")
                )
                death = self._deaths.explain(process.pid)
                if death is not None:
                    happened.append(DeathExplained(worker=worker, death=death))
                self.kill(worker)
        return happened

    def describe_shortage(self, wanted: int | None = None) -> str:
        return ""

    def gcs_health(self) -> None:
        return None

    def close(self) -> None:
        for worker in list(self._processes):
            self.kill(worker)
        self.end_unreachable()
        self._deaths.close()
        if self._store is not None:
            self._store.close()
            self._store = None


class Startable(Protocol):
    """A run to start with a launcher: an `ElasticTrainer`."""

    def start_with(self, launcher: Callable[[Job], Launcher], listen: Listener | None = None) -> Run: ...


def fit(trainer: Startable, listen: Listener | None = None) -> Result:
    """As `trainer.fit(listen)`, with processes of this machine as workers: no Ray, and a start in a second."""
    run = trainer.start_with(ProcessLauncher, listen)
    return run.wait()


def _pickled(job: Job) -> bytes:
    """The job for a process of `multiprocessing`, whose own pickling would share each tensor of the data by a handle.

    With lambdas and other objects that a process cannot import, it comes by value, as with Ray. Raises ConfigError with
    the part that cannot be sent.
    """
    prepared = spawn.get_preparation_data("")
    if not os.path.exists(main := prepared.get("init_main_from_path", os.sep)):
        raise ConfigError(
            f"this program comes from {os.path.basename(main)}, and each worker's process imports it again: put it "
            "into a file, or use fit() with Ray."
        )
    with contextlib.suppress(Exception):
        data = pickle.dumps(job)
        if b"__main__" not in data or _IMPORTED_MAIN & prepared.keys():
            return data
    from ray import cloudpickle

    try:
        return bytes(cloudpickle.dumps(job))
    except Exception:  # any error of the user's objects
        from raysharded.ray_backend.cluster import refuse_unsendable

        refuse_unsendable(sent_objects(job.task, job.data, job.evaluation, job.preemption_notices))
        raise


def _serve_pickled(
    worker: WorkerId, job: bytes, pipe: Connection, prepare: Callable[[], None] | None, identity: str
) -> None:
    serve(worker, pickle.loads(job), pipe, prepare, identity)  # noqa: S301 - from the process that started this one


def _send(pipe: Connection, reply: Reply) -> None:
    """Send a reply; dropped if the launcher has closed the pipe, because this process is about to be killed."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.send(reply)


def serve(
    worker: WorkerId, job: Job, pipe: Connection, prepare: Callable[[], None] | None = None, identity: str = ""
) -> None:
    """A worker process: executes calls, each in a separate thread, until the launcher has exited."""
    if prepare is not None:
        prepare()
    from raysharded.actors.worker import Worker

    position_record.begin()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As in Ray's workers. With forkserver, the parent's method, each lock (tqdm has one) stays named until it is freed,
    # which does not happen in a killed process: Python would warn of leaked semaphores at the end of the run.
    multiprocessing.set_start_method(None, force=True)
    sending = threading.Lock()
    served: Worker | None = None

    def answer(method: str, args: tuple[Any, ...]) -> None:
        try:
            reply = Reply(worker=worker, method=method, value=getattr(served, method)(*args))
        except BaseException as error:  # noqa: BLE001 - the boundary of the process: everything becomes a message
            if not isinstance(error, Exception) or os.environ.get("RAYSHARDED_DEBUG"):
                traceback.print_exc()
            reply = Reply(worker=worker, method=method, error=error.with_traceback(None))
        if not network.is_cut_off():
            with sending:
                _send(pipe, reply)

    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        if network.is_cut_off():  # the call never arrived
            continue
        if served is None:
            try:
                served = Worker(worker, job, run_storage(job.run_url, identity))
            except Exception as error:  # noqa: BLE001 - as above
                pipe.send(WorkerLost(worker=worker, reason=f"{type(error).__name__}: {error}", error=error))
                os._exit(1)
        threading.Thread(target=answer, args=(method, args), daemon=True).start()
