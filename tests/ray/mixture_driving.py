"""A driver whose mixture gets other weights by hand, in a separate process: `python -m tests.ray.mixture_driving`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import raysharded as rs
from tests.ray.driving import LEASE_S, MICROBATCHES, STEPS, PacedTokens, tell
from tests.training.harness import GptTask

BATCH = 2 * MICROBATCHES
PLANNED = {"web": 3.0, "books": 1.0}
BY_HAND = {"web": 1.0, "books": 2.0, "code": 2.0}
CHANGED_AFTER = 2
"""The step at whose entry the weights are changed."""


class Source(PacedTokens):
    """Samples of this source alone."""

    def __init__(self, folder: Path, first: int) -> None:
        super().__init__(folder)
        self._first = first

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self._first + index)


def mixture(folder: Path, by_hand_from: int | None = None) -> rs.Mixture:
    """The run's data. `by_hand_from`: with the later weights planned from this position on."""
    sources = {name: Source(folder, 1000 * number) for number, name in enumerate(("web", "books", "code"))}
    changed = [] if by_hand_from is None else [(by_hand_from, BY_HAND)]
    return rs.Mixture(sources, [(0, PLANNED), *changed], seed=3)


def trainer(folder: Path, workers: int) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=GptTask(),
        data=mixture(folder),
        batch=rs.BatchConfig(global_batch_size=BATCH, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=workers, cpus_per_worker=0.5),
        run=rs.RunConfig(name="mixed", storage_path=str(folder), max_steps=STEPS, lease_s=LEASE_S),
        engine=rs.EngineConfig(prefetch=False),
    )


def main() -> None:
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    runs: list[rs.Run] = []

    @contextmanager
    def kept(run: rs.Run) -> Iterator[None]:
        runs.append(run)
        yield

    def listen(kind: str, fields: dict[str, Any]) -> None:
        tell(kind, fields)
        if kind == "step" and fields["step"] == CHANGED_AFTER:
            runs[0].set_mixture_weights(BY_HAND)

    trainer(folder, workers).fit(listen, context=kept)


if __name__ == "__main__":
    from tests.ray.mixture_driving import main as imported_main  # so that the classes have one name everywhere

    imported_main()
