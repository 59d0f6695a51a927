"""The workers: each holds a shard of the model, and all run the training step together.

Reading order: `worker` (calls from the driver), `step.step` (one step), `reduction` and `numerics` (sums), `shards`
(state in memory), `model` and `optimizer` (built by the task). This package imports torch, not Ray. Only
`comm.groups` makes process groups.
"""

from __future__ import annotations

if __name__ != "raysharded.actors":
    raise ImportError(
        f"this package was imported as {__name__!r}, which would make a second copy of every class in it. "
        "Import it as `raysharded.actors`; the `actors` link at the top of the repository is for reading only."
    )
