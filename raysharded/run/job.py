"""`fit()` in a submitted Ray job: the run has a host of its own, which this process follows to its end.

Ray ends a job that is stopped with SIGTERM, and 3 s later with SIGKILL; a detached actor is not reached by either. So
the driver is one, and the job's process only tells it to stop: the last checkpoint is written within `grace_s` whatever
becomes of the job. Submitted again meanwhile, the job waits for that; if the job's process was lost and the driver goes
on, the next one follows it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from raysharded.driver.ray_launcher import quiet_raylet
from raysharded.errors import RayshardedError, RunOwnedElsewhere
from raysharded.run import hosting, hosts, orders
from raysharded.run.attached import AttachedRun
from raysharded.run.handle import Run
from raysharded.run.results import Entry, Listener, Result
from raysharded.run.telling import listening, tokens_per_step
from raysharded.signals import on_notice

if TYPE_CHECKING:
    from raysharded.trainer import ElasticTrainer

_log = logging.getLogger("raysharded.job")
_LOOK_UP_S = 1.0
_PACKAGES = "/runtime_resources/"
"""Where Ray unpacks a job's working directory, and deletes it some day."""


def fit_in_job(
    trainer: ElasticTrainer,
    listen: Listener | None,
    *,
    progress: bool,
    take_over: bool,
    beside: Callable[[Run], AbstractContextManager[object]] | None,
) -> Result:
    """As `ElasticTrainer.fit`, with a host."""
    run = _started_or_followed(trainer, take_over=take_over)
    if _PACKAGES in run.url:
        _log.warning(
            "run %s is stored in %s, the job's own folder, which Ray deletes: give an absolute storage_path or a URL",
            run.name,
            run.url,
        )
    with (
        quiet_raylet(),
        listening(trainer.run.max_steps, tokens_per_step(trainer), progress, listen) as told,
        contextlib.nullcontext() if beside is None else beside(run),
        _stopped_with_the_job(run, trainer.run.checkpoint.grace_s),
    ):
        for batch in _followed(run):
            for _, kind, fields in batch:
                told(kind, {name: value for name, value in fields.items() if name != "at"})
        return run.wait()


def _started_or_followed(trainer: ElasticTrainer, *, take_over: bool) -> AttachedRun:
    waited = False
    while True:
        try:
            return hosting.start_hosted(trainer, take_over=take_over)
        except RunOwnedElsewhere:
            order = orders.make_order(orders.absolute(trainer), take_over=False)
            host = hosts.host_of(hosts.host_name(order.name, order.url))
            found = hosts.about(host) if host is not None else None
            if found is None or found.is_over:
                continue
            if found.is_stopping:
                if not waited:
                    _log.warning("run %s: its driver before is told to stop, and waited for (%s)", order.name, found)
                waited = True
                with contextlib.suppress(RayshardedError, TimeoutError):  # what it ends with is no news
                    AttachedRun(order.name, order.url).wait(_LOOK_UP_S)
            elif found.identity == order.identity:
                _log.warning("run %s: its driver goes on, and is followed (%s)", order.name, found)
                return AttachedRun(order.name, order.url)
            else:
                raise


def _followed(run: Run) -> Iterator[list[Entry]]:
    """As `run.follow`, with the calling thread free to hear signals at once."""
    found: queue.SimpleQueue[list[Entry] | BaseException | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for batch in run.follow():
                found.put(batch)
            found.put(None)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            found.put(error)

    threading.Thread(target=read, name="follow", daemon=True).start()
    while True:
        try:
            batch = found.get(timeout=_LOOK_UP_S)
        except queue.Empty:
            continue
        if isinstance(batch, BaseException):
            raise batch
        if batch is None:
            return
        yield batch


@contextlib.contextmanager
def _stopped_with_the_job(run: Run, grace_s: float) -> Iterator[None]:
    """Within it, SIGTERM and Ctrl-C tell the run's driver to end it, after one more checkpoint if there is a grace
    period. Ctrl-C, or a second SIGTERM, does not wait for that."""
    noticed, told = threading.Event(), threading.Event()

    def tell() -> None:
        noticed.wait()
        if not told.is_set():
            with contextlib.suppress(RayshardedError):  # it is over, or cannot be told
                run.stop(checkpoint=grace_s > 0, within_s=grace_s)
        told.set()

    threading.Thread(target=tell, name="stop", daemon=True).start()
    try:
        with on_notice(noticed.set, max(grace_s, _LOOK_UP_S)):
            yield
    except KeyboardInterrupt:
        noticed.set()
        told.wait()
        raise KeyboardInterrupt(
            f"Interrupted. The driver of run {run.name!r} was told to stop"
            f"{f', with a checkpoint within {grace_s:g} s' if grace_s > 0 else ''}; the next fit() goes on from there."
        ) from None
    finally:
        told.set()
        noticed.set()
