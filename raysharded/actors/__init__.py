"""The workers: a shard of the model each, and the training step over all of them.

Reading order: `worker` (what the driver calls), `step.engine` (one step), `reduction` and `numerics` (the sums),
`shards` (the state in memory), `model` and `optimizer` (what the task builds). Torch lives here, Ray does not.
`comm.groups` alone makes process groups.
"""

from __future__ import annotations

if __name__ != "raysharded.actors":
    raise ImportError(
        f"this package was imported as {__name__!r}, which would make a second copy of every class in it. "
        "Import it as `raysharded.actors`; the `actors` link at the top of the repository is for reading only."
    )
