"""Requests to a run, carried out by its driver in this process; also forks of the run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raysharded.driver.handlers import run_changes, user_requests
from raysharded.errors import CheckpointError, ConfigError, RunFailed
from raysharded.overrides import consumed, skipped_before, weights_before
from raysharded.run.results import WrittenCheckpoint
from raysharded.task import require_tensor_parallelism

if TYPE_CHECKING:
    from raysharded.checkpoint import SigningKey, Storage
    from raysharded.checkpoint.retention.catalog import CheckpointRef
    from raysharded.data import Mixture
    from raysharded.driver.driver import Driver
    from raysharded.driver.state.state import State
    from raysharded.run.group_planner import GroupPlanner
    from raysharded.run.handle import Run
    from raysharded.run.spec import RunSpec


def forked(spec: RunSpec, storage: Storage, name: str, step: int | None, where: str | None) -> RunSpec:
    """The specification of the fork `name`, which begins with a committed checkpoint of the run at `storage`.

    `step`: the checkpoint's (None: the newest); `where`: the fork's storage path. Nothing is started.
    """
    from raysharded.checkpoint import fork, open_storage
    from raysharded.run.translation import key_of

    run = dataclasses.replace(spec.run, name=name, storage_path=where or spec.run.storage_path)
    other = dataclasses.replace(spec, run=run)
    if open_storage(other.url).url == storage.url:
        raise ConfigError(f"Run.fork: {name!r} is this run's own name. Give the fork another name or storage.")
    key = key_of(spec.run.checkpoint)
    fork(storage, _chosen(storage, step, key), open_storage(other.url), key=key)
    return other


def _chosen(storage: Storage, step: int | None, key: SigningKey | None) -> CheckpointRef:
    from raysharded.checkpoint import list_checkpoints
    from raysharded.checkpoint.retention.catalog import last_unmarked

    committed = [ref for ref in list_checkpoints(storage, key=key) if ref.state == "committed"]
    found = [ref for ref in committed if step in (None, ref.step)]
    if found:
        return last_unmarked(found)
    steps = ", ".join(map(str, sorted({ref.step for ref in committed}))) or "none; Run.checkpoint() has one written"
    of = "" if step is None else f" of step {step}"
    raise CheckpointError(f"the run at {storage.url} has no committed checkpoint{of}; there are: {steps}.")


def _ends_early(data: Mixture, state: State, weights: Mapping[str, float]) -> str:
    """Reason why the mixture would end before the run with these weights from the next step on; empty if unknown."""
    if not data.max_epochs:
        return ""
    skips, batch = state.decisions.skips, state.limits.global_batch_size
    done, last = max(state.step, state.reached), state.limits.max_steps
    position = done * batch + skipped_before(skips, done + 1)
    earlier = [(start, dict(given)) for _, start, given in weights_before(state.decisions.weights, position)]
    with contextlib.suppress(Exception):  # perhaps only the workers' nodes have the data; a user's may raise anything
        length, needed = len(data.with_changes([*earlier, (position, weights)])), consumed(skips, last, batch)
        if length < needed:
            return f"the mixture would end after {length} samples, and the run needs {needed}: raise a max_epochs."
    return ""


class RunControl:
    """The implementation of `Run`'s methods. Any thread; each method is named as it is there."""

    def __init__(self, spec: RunSpec, groups: GroupPlanner, storage: Storage, start: Callable[[RunSpec], Run]) -> None:
        """`start` starts another run in the same way as this one."""
        self._spec, self._groups, self._storage, self._start = spec, groups, storage, start
        self._driver: Driver | None = None
        self._driving: int | None = None
        """Thread that drives the run."""
        self._begun, self._over = threading.Event(), threading.Event()
        self._stopped: dict[str, Any] | None = None
        """Arguments of the first stop request that came before the driver was ready."""
        self._scaling = spec.scaling
        """The latest requested configuration."""

    # -- for the owner of the run --

    @property
    def driver(self) -> Driver | None:
        """The driver; None before it has acquired the run."""
        return self._driver

    def warnings(self) -> tuple[str, ...]:
        """The driver's warnings; none before it has acquired the run."""
        return self._driver.warnings() if self._driver is not None else ()

    def wait_until_begun(self, timeout_s: float | None = None) -> bool:
        """Return when the driver is ready, or never will be: True; after `timeout_s`: False."""
        return self._begun.wait(timeout_s)

    def is_stopped(self) -> bool:
        """Whether a stop was requested before the driver was ready."""
        return self._stopped is not None

    def begin(self, driver: Driver) -> None:
        """Register the driver, which has acquired the run."""
        self._ask_again(driver)
        self._driver, self._driving = driver, threading.get_ident()
        self._begun.set()
        if self._stopped is not None:
            driver.stop(checkpoint_within_s=None)

    def end(self) -> None:
        """Mark the run as over, or as never begun."""
        self._over.set()
        self._begun.set()

    def _ask_again(self, driver: Driver) -> None:
        """Repeat the last mesh request, unless the run's configuration has changed since."""
        asked = driver.asked_last(self._spec.settings()["scaling"])
        if asked is not None:
            size, degree = asked
            self._scaling = dataclasses.replace(
                self._spec.scaling, shard_group_size=size, tensor_parallel_degree=degree
            )
            driver.begin_with(self._groups.grouping(self._scaling))

    # -- for users --

    def pause(self) -> None:
        self._willing("pause", user_requests.pause_refusal).pause()

    def resume(self) -> None:
        self._willing("resume", user_requests.resume_refusal).resume()

    def resize(self, workers: int) -> None:
        self._willing("resize", lambda state: user_requests.resize_refusal(state, workers)).resize(workers)

    def drain(self, node: str, within_s: float) -> None:
        def refusal(state: State) -> str:
            return user_requests.drain_refusal(state, node, within_s) or user_requests.ambiguity(state, node)

        self._willing("drain", refusal).drain(node, within_s)

    def set_learning_rate(self, factor: float) -> None:
        willing = self._willing("set_learning_rate", lambda state: run_changes.rate_refusal(state, factor))
        willing.set_learning_rate(factor)

    def set_mixture_weights(self, weights: Mapping[str, float]) -> None:
        from raysharded.data.mixtures.mixture import Mixture, checked_weights

        data = self._spec.data
        if not isinstance(data, Mixture):
            raise ConfigError(
                f"Run.set_mixture_weights: the data of the run are a {type(data).__name__}, and only a "
                "raysharded.Mixture has weights."
            )
        checked = checked_weights(data.sources, "Run.set_mixture_weights", weights)

        def refusal(state: State) -> str:
            return run_changes.weights_refusal(state, list(checked.items())) or _ends_early(data, state, checked)

        self._willing("set_mixture_weights", refusal).set_mixture_weights(checked)

    def rewind(self, step: int, skip_data: bool) -> None:
        willing = self._willing("rewind", lambda state: run_changes.rewind_refusal(state, step))
        willing.rewind(step, skip_data)

    def reshard(self, given: Mapping[str, Any]) -> None:
        scaling = dataclasses.replace(self._scaling, **given)
        require_tensor_parallelism(self._spec.task, scaling.tensor_parallel_degree)
        grouping = self._groups.grouping(scaling)
        driver = self._willing("reshard", lambda state: run_changes.reshard_refusal(state, grouping))
        self._scaling = scaling
        driver.reshard(grouping)

    def checkpoint(self, timeout_s: float | None) -> WrittenCheckpoint:
        from raysharded.locations import join_url

        if threading.get_ident() == self._driving:
            raise ConfigError(
                "Run.checkpoint() would wait for itself: call it from another thread than the listener's."
            )
        name, deadline = self._spec.run.name, None if timeout_s is None else time.monotonic() + timeout_s
        if not self._begun.wait(timeout_s):
            raise TimeoutError(f"run {name!r} has not begun after {timeout_s} s")
        if self._driver is None or self._over.is_set():
            raise self._is_over()
        promise = self._driver.checkpoint()
        try:
            step, prefix = promise.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"no checkpoint of run {name!r} is committed yet, after {timeout_s} s") from None
        return WrittenCheckpoint(step=step, url=join_url(self._spec.url, prefix))

    def stop(self, checkpoint: bool, within_s: float | None) -> None:
        driver = self._driver
        if driver is None:
            self._stopped = self._stopped or {"checkpoint": checkpoint, "within_s": within_s}
            driver, checkpoint = self._driver, False  # it may have become ready after the first check
        if driver is not None:
            within = None if not checkpoint else within_s if within_s is not None else math.inf
            driver.stop(checkpoint_within_s=within)

    def fork(self, name: str, step: int | None, storage_path: str | None) -> Run:
        return self._start(forked(self._spec, self._storage, name, step, storage_path))

    def remark(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._driver is not None:
            self._driver.remark(kind, fields)

    def _willing(self, what: str, refusal: Callable[[State], str]) -> Driver:
        """The driver, if it accepts the request."""
        self._begun.wait()
        if self._driver is None or self._over.is_set():
            raise self._is_over()
        reason = refusal(self._driver.state)
        if reason:
            raise ConfigError(f"Run.{what}: {reason}")
        return self._driver

    def _is_over(self) -> RunFailed:
        return RunFailed(f"Run {self._spec.run.name!r} is over.")
