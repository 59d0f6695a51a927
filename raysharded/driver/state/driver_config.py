"""What the state machine needs of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.driver.state.mesh_choice import Grouping
from raysharded.layout import Parity


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverConfig:
    """What the machine needs of the configuration. Times are seconds."""

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
    """Go back to a checkpoint when a number is not finite, and on past the data of the steps since."""
    max_skipped_steps: int = 10
    """In a row, that may be left out because a number is not finite."""
    parity: Parity | None = None
    """In place of mirrors, where there are workers enough."""
    global_batch_size: int = 1
    """Samples of a step."""
    stop_timeout_s: float = 20.0
    """How long an interrupted worker may take to answer before it is given up."""
    form_timeout_s: float = 120.0
    """How long forming a generation may take."""
    hang_timeout_s: float = 5.0
    """The shortest deadline of a step."""
    forming_patience_s: float = 10.0
    """After so long of forming, or of writing the last checkpoint, members that do not even say where they are are
    given up."""
    stopping_patience_s: float = 3.0
    """The same, of members that were interrupted."""
    evict_slower_than: float | None = None
    """Who takes so many times as long as its peers is told to leave."""
    look_around_s: float = 10.0
    """How often the members are asked how fast they are."""
    compiles: bool = False
    """A generation's first step may take much longer than the others."""
    prepare_within_s: float = 0.0
    """How long a planned change may be prepared beside training before it is made all the same; 0: it is not
    prepared."""
    join_wait_s: float = 2.0
    """How long ready workers wait for others that are still starting, to join in one go."""
    save_timeout_s: float = 1800.0
    save_every_s: float | None = None
    """Time from the beginning of one checkpoint to the request for the next; None: none is requested by time."""
    max_failed_saves: int = 3
    """Checkpoints in a row that may fail before the run says so loudly."""
    stop_on_failed_saves: bool = False
    """End the run then."""
    last_save_retries: int = 2
    """How often the last checkpoint is tried again before the run fails."""
    spares: int = 0
    """Workers kept ready beyond the maximum."""
    grouping: Grouping | None = None
    """How they form shard groups and tensor parallel groups; None: they are one shard group."""
    last_save_backoff_s: float = 2.0
    """How long to wait before that; twice as long every time."""
    max_start_failures: int = 3
    """Workers in a row that may fail to start while there are too few."""
    start_backoff_s: float = 1.0
    """How long to wait after a worker failed to start; twice as long after every further one in a row."""
    max_start_backoff_s: float = 60.0
    max_idle_generations: int = 5
    """Generations in a row that may end without a step and without a loss."""
    max_node_failures: int | None = None
    """Failures after which a node gets no new workers; None: it always does."""
    configured_workers: int | None = None
    """The maximum that was configured, if somebody asked for another number of workers since."""
    max_losses_without_step: int = 64
    """How often in a row workers may be lost without a new step: more is not bad luck, but something kills them."""
    accept_arithmetic: bool = False
    """Go on where all workers would compute other bits than the run did before."""
    proves_first_step: bool = False
    """Workers that come to a generation have to prove its first step."""

    @property
    def tensor(self) -> int:
        """The tensor parallel degree that is wanted."""
        return self.grouping.tensor if self.grouping else 1

    @property
    def most_workers(self) -> int:
        """The most that may be asked for."""
        return self.max_workers if self.configured_workers is None else self.configured_workers
