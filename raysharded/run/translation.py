"""A run's specification in the terms of its parts: the driver's limits, the workers' job, the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from raysharded.checkpoint import SigningKey, Storage
    from raysharded.config import CheckpointConfig
    from raysharded.driver.checkpoints.committer import RunFiles
    from raysharded.driver.state.driver_config import DriverConfig
    from raysharded.driver.state.mesh_choice import Grouping
    from raysharded.protocol.job import Job
    from raysharded.run.spec import RunSpec

PREPARE_WITHIN_S = 30.0
"""Longest time that a planned change is prepared in the background before it is made all the same."""


def limits_of(spec: RunSpec, grouping: Grouping | None) -> DriverConfig:
    """The part of the configuration that the driver's state machine uses. `grouping`: the result of `GroupPlanner`."""
    from raysharded.driver.state.driver_config import DriverConfig
    from raysharded.layout import parity_of

    failure, wanted = spec.run.failure, spec.engine.prepare_changes
    prepares = not spec.scaling.use_gpu if wanted is None else wanted
    return DriverConfig(
        min_workers=spec.scaling.min_workers,
        max_workers=spec.scaling.max_workers,
        max_steps=spec.run.max_steps,
        exact=spec.engine.reduction == "exact",
        mirrors=spec.engine.mirrors,
        parity=parity_of(spec.engine.redundancy),
        save_at_end=spec.run.checkpoint.at_end,
        save_every_s=spec.run.checkpoint.save_every_s,
        start_timeout_s=spec.scaling.start_timeout_s,
        replacement_wait_s=spec.scaling.replacement_wait_s,
        spares=spec.scaling.spares,
        grouping=grouping,
        max_worker_losses=failure.max_worker_losses,
        max_node_failures=failure.max_node_failures,
        node_failure_window_s=failure.node_failure_window_s,
        task_error_retries=failure.task_error_retries,
        max_same_deaths=failure.max_same_deaths,
        evict_slower_than=failure.evict_slower_than,
        hang_timeout_s=failure.hang_timeout_s,
        compiles=spec.engine.compile,
        prepare_within_s=PREPARE_WITHIN_S if prepares else 0.0,
        progress_timeout_s=failure.progress_timeout_s,
        form_timeout_s=failure.progress_timeout_s,
        max_failed_saves=spec.run.checkpoint.max_failed_saves,
        stop_on_failed_saves=spec.run.checkpoint.on_failed_saves == "stop",
        rewind=failure.on_non_finite == "rewind",
        save_every_steps=spec.run.checkpoint.every_steps if failure.on_non_finite == "rewind" else None,
        max_skipped_steps=failure.max_skipped_steps,
        global_batch_size=spec.batch.global_batch_size,
        accept_arithmetic=spec.run.accept_arithmetic,
        audits=spec.engine.audit_every_steps is not None,
        proves_first_step=spec.engine.prove_first_step and spec.engine.reduction == "exact",
    )


def files_of(spec: RunSpec, storage: Storage, versions: Mapping[str, str]) -> RunFiles:
    """The run's checkpoints and journal. Raises CheckpointError if the key that signs checkpoints cannot be read."""
    from raysharded.checkpoint.retention.policy import Keep
    from raysharded.driver.checkpoints.committer import RunFiles

    config = spec.run.checkpoint
    return RunFiles(
        name=spec.run.name,
        storage=storage,
        keep=Keep(last=config.keep_last, every_steps=config.keep_every, best=spec.best),
        metadata={**spec.settings(), "versions": dict(versions)},
        global_batch_size=spec.batch.global_batch_size,
        key=key_of(config),
        accept_unsigned=spec.run.accept_unsigned,
        at_least_step=spec.run.at_least_step or 0,
        patience_s=spec.run.failure.storage_patience_s,
        backlog_bytes=spec.run.failure.storage_backlog_bytes,
    )


def key_of(config: CheckpointConfig) -> SigningKey | None:
    """The key that signs a run; None if it has none. Raises CheckpointError if it cannot be read, or is required."""
    from raysharded.checkpoint import SigningKey, signing_key_from_environment

    if config.signing_key_file is not None:
        return SigningKey.from_file(config.signing_key_file)
    return signing_key_from_environment(require_signed=config.require_signed)


def job_of(spec: RunSpec) -> Job:
    """The description of the run that every worker is started with."""
    from raysharded.checkpoint import open_storage
    from raysharded.protocol.job import Job

    return Job(
        run_name=spec.run.name,
        run_url=open_storage(spec.url).url,  # absolute: workers have separate working directories
        task=spec.task,
        data=spec.data,
        batch=spec.batch,
        engine=spec.engine,
        evaluation=spec.evaluation,
        max_steps=spec.run.max_steps,
        save_every_steps=spec.run.checkpoint.every_steps,
        save_at_end=spec.run.checkpoint.at_end,
        use_gpu=spec.scaling.use_gpu,
        num_threads=spec.threads_per_worker,
        collective_timeout_s=max(60.0, 2 * spec.run.failure.progress_timeout_s),
        read_patience_s=spec.run.failure.hang_timeout_s / 2,
        grace_s=spec.run.checkpoint.grace_s,
        on_non_finite=spec.run.failure.on_non_finite,
        preemption_notices=spec.run.failure.preemption_notices,
        records_microbatches=spec.run.record_microbatches,
        faults=spec.faults,
        initial_weights=spec.initial_weights,
    )
