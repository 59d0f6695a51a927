"""The part of the configuration that the state machine uses."""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.driver.state.mesh_choice import Grouping
from raysharded.layout import Parity


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverConfig:
    """The part of the configuration that the state machine uses. Times are seconds."""

    min_workers: int
    max_workers: int
    max_steps: int
    exact: bool
    mirrors: bool
    save_at_end: bool
    start_timeout_s: float
    replacement_wait_s: float
    max_worker_losses: int | None
    task_error_retries: int
    progress_timeout_s: float
    rewind: bool = False
    """Go back to a checkpoint when a number is not finite, and skip the data of the steps since."""
    max_skipped_steps: int = 10
    """Consecutive steps that may be skipped because a number is not finite."""
    parity: Parity | None = None
    """Parity in place of mirrors, where there are enough workers."""
    global_batch_size: int = 1
    """Samples of a step."""
    stop_timeout_s: float = 20.0
    """Longest time that an interrupted worker may take to answer before it counts as lost."""
    form_timeout_s: float = 120.0
    """Longest time that forming a generation may take."""
    hang_timeout_s: float = 5.0
    """Shortest deadline of a step."""
    forming_patience_s: float = 10.0
    """Time in forming, or in writing the last checkpoint, after which members that do not answer a probe are killed."""
    stopping_patience_s: float = 3.0
    """Time after which interrupted members that do not answer a probe are killed."""
    evict_slower_than: float | None = None
    """A worker that takes this many times as long as its peers has to leave."""
    look_around_s: float = 10.0
    """Interval at which the members are probed for their speed."""
    compiles: bool = False
    """Whether a generation's first step may take much longer than the others."""
    prepare_within_s: float = 0.0
    """Longest time that a planned change may be prepared in the background before it is made; 0: not prepared."""
    join_wait_s: float = 2.0
    """Time that ready workers wait for others that are still starting, to join together."""
    save_timeout_s: float = 1800.0
    save_every_steps: int | None = None
    """With `rewind`: steps from one due checkpoint to the next."""
    save_every_s: float | None = None
    """Time from the beginning of one checkpoint to the request for the next; None: none is requested by time."""
    max_failed_saves: int = 3
    """Consecutive checkpoints that may fail before the run reports it prominently."""
    stop_on_failed_saves: bool = False
    """End the run after so many failed checkpoints."""
    last_save_retries: int = 2
    """Retries of the last checkpoint before the run fails."""
    spares: int = 0
    """Ready workers beyond the maximum."""
    grouping: Grouping | None = None
    """Shard groups and tensor parallel groups of the workers; None: one shard group."""
    last_save_backoff_s: float = 2.0
    """Wait before the first retry of the last checkpoint; it doubles each time."""
    max_start_failures: int = 3
    """Consecutive workers that may fail to start while there are too few."""
    start_backoff_s: float = 1.0
    """Wait after a worker failed to start; it doubles with every further failure in a row."""
    max_start_backoff_s: float = 60.0
    max_idle_generations: int = 5
    """Consecutive generations that may end without a step and without a loss."""
    max_node_failures: int | None = None
    """Failures after which a node gets no new workers; None: no limit."""
    node_failure_window_s: float = 3600.0
    """Time for which a failure on a node counts."""
    link_pause_s: float = 30.0
    """Time until a broken link is tested again; it doubles with every further test that fails, up to 10 minutes."""
    configured_workers: int | None = None
    """The configured maximum, if another number of workers was requested since."""
    max_losses_without_step: int = 64
    """Losses in a row without a new step that the run tolerates; more are not chance: something kills the workers."""
    max_same_deaths: int | None = None
    """Generations whose workers may end by themselves in the same way and step; None: no limit."""
    accept_arithmetic: bool = False
    """Continue if all workers would compute other bits than the run did before."""
    audits: bool = True
    """Whether steps may be audited: those since the newest verified one may then be undone."""
    proves_first_step: bool = False
    """Whether workers that join a generation have to prove its first step."""

    @property
    def tensor(self) -> int:
        """The wanted tensor parallel degree."""
        return self.grouping.tensor if self.grouping else 1

    @property
    def most_workers(self) -> int:
        """Largest number of workers that may be requested."""
        return self.max_workers if self.configured_workers is None else self.configured_workers
