"""The order of samples by arithmetic: how well it mixes, beside a true permutation, and the blocks that nodes read.

python -m benchmarks.data_order [--only quality nodes] [--json PATH]

`quality`: an epoch of 262 billion tokens under order 2, at drawn places. The data are four sources that follow
each other, in blocks of `TokenDataset`, of `PackedDataset`, and of a source of a mixture. The permutation is drawn, as
so large a one. `nodes`: bytes that nodes without a shared disk read, over bytes used. Each reads the blocks of its
positions once. Nothing is read here, no tokens are needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raysharded.data.order import WINDOW_BLOCKS, Blocks, sample_ids
from raysharded.data.packed.arrange import samples_per_block as samples_per_group
from raysharded.data.store.layout import Kind

Ids = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

ORDER, SEED, SOURCES = 2, 5, 4
SEQ_LENS = (128, 2048, 8192)
BATCHES = (32, 256, 1024, 4096)
BLOCK_TOKENS = 1 << 16
EPOCH_BLOCKS = 4_000_000
"""Blocks of an epoch: 262 billion tokens."""
PAIRS = 2_000
"""Places of an epoch at which two steps in a row are drawn; half of them for large steps."""
SPAN = 1000
"""Samples in a row of which the sources are counted, too."""
KIND = Kind(tokenizer="bytes", vocab_size=50_257)
NODES = (1, 4, 8)
WINDOWS = (1, 2, 4, 8, 13, 14, 16, 32, 60, 61, 64, 100, 124, 125)
RESTS = (0.0, 0.5, 0.99)
"""Parts of a window behind the last whole one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Figures of an order. A true permutation has no correlations, and deviations of 1."""

    neighbours: float
    """Correlation of the samples at neighbouring positions."""
    in_one_block: float
    """Share of neighbouring positions whose samples are of one block."""
    different_blocks: float
    """Blocks of a step, over its samples."""
    deviation_of_step: float
    """Standard deviation of a source's share in a step, over that of the permutation."""
    deviation_of_span: float
    """That of its share in `SPAN` samples in a row."""
    next_step: float
    """Correlation of a source's share in a step with that in the next one."""
    next_step_of_permutation: float


def quality(samples: int, batch: int, columns_of: int) -> Quality:
    """The figures of an order at drawn places of an epoch.

    `samples`: per block. `columns_of`: samples of a step that the order divides: `batch`, or 1 in a mixture.
    """
    num_samples = EPOCH_BLOCKS * samples
    blocks, rng = Blocks(samples, columns_of), np.random.default_rng(1)
    pairs = rng.integers(0, num_samples // batch - 1, PAIRS if batch <= WINDOW_BLOCKS else PAIRS // 2)
    spans = rng.integers(0, num_samples - SPAN, PAIRS)
    pairs, spans = pairs[:, None] * batch + np.arange(2 * batch), spans[:, None] + np.arange(SPAN)
    in_pairs, in_spans = (sample_ids(SEED, part, num_samples, ORDER, blocks) for part in (pairs, spans))
    true_pairs, true_spans = (rng.integers(0, num_samples, part.shape) for part in (pairs, spans))
    shares, true_shares = (_shares(ids.reshape(-1, batch), num_samples) for ids in (in_pairs, true_pairs))
    numbers = in_spans // samples
    steps = in_pairs.reshape(-1, batch) // samples
    return Quality(
        neighbours=float(np.corrcoef(in_spans[:, :-1].reshape(-1), in_spans[:, 1:].reshape(-1))[0, 1]),
        in_one_block=float((numbers[:, :-1] == numbers[:, 1:]).mean()),
        different_blocks=float(np.mean([len(np.unique(step)) for step in steps])) / batch,
        deviation_of_step=_deviation(shares) / _deviation(true_shares),
        deviation_of_span=_deviation(_shares(in_spans, num_samples)) / _deviation(_shares(true_spans, num_samples)),
        next_step=_with_the_next(shares),
        next_step_of_permutation=_with_the_next(true_shares),
    )


def _shares(ids: Ids, num_samples: int) -> Shares:
    """Share of each source in each row of ids; [rows, SOURCES]."""
    sources = ids * SOURCES // num_samples
    return np.stack([(sources == number).mean(axis=1) for number in range(SOURCES)], axis=1)


def _deviation(shares: Shares) -> float:
    return float(shares.std(axis=0).mean())


def _with_the_next(shares: Shares) -> float:
    """Correlation of the shares in even rows with those in the next rows; mean over the sources."""
    return float(np.mean([np.corrcoef(of[::2], of[1::2])[0, 1] for of in shares.T]))


def bytes_over_used(
    nodes: int, windows: float, *, seq_len: int = 2048, batch: int = 32, window: int = WINDOW_BLOCKS
) -> tuple[float, float]:
    """(Blocks that all nodes read in an epoch over those of the data, the bytes of them over the bytes used).

    Each node has the same number of a step's positions, keeps the blocks that are open for it, and shares no disk. A
    block of a store has a page more for its last target. `windows`: size of the data in windows of the order.
    """
    samples = BLOCK_TOKENS // seq_len
    num_samples = int(windows * window) * samples
    positions = np.arange(num_samples // batch * batch).reshape(-1, batch)
    ids = sample_ids(SEED, positions, num_samples, ORDER, Blocks(samples, batch)) // samples
    read = sum(len(np.unique(part)) for part in np.split(ids, nodes, axis=1))
    block = (BLOCK_TOKENS // KIND.page_tokens + 1) * KIND.page_bytes
    blocks = read * samples / num_samples
    return blocks, blocks * block / (BLOCK_TOKENS * KIND.token_bytes)


def rows_of_quality() -> Iterator[dict[str, Any]]:
    """Rows of the table in docs/determinism.md."""
    for batch in BATCHES:
        for seq_len in SEQ_LENS:
            kinds = (
                ("TokenDataset", BLOCK_TOKENS // seq_len, batch),
                ("PackedDataset", samples_per_group(seq_len), batch),
                ("source of a mixture", BLOCK_TOKENS // seq_len, 1),
            )
            for data, samples, columns_of in kinds:
                about = {"data": data, "seq_len": seq_len, "samples_per_block": samples, "batch": batch}
                yield {**about, **asdict(quality(samples, batch, columns_of))}


def rows_of_nodes() -> Iterator[dict[str, Any]]:
    for windows in WINDOWS:
        for rest in RESTS:
            for nodes in NODES:
                blocks, read = bytes_over_used(nodes, windows + rest)
                yield {"windows": windows + rest, "nodes": nodes, "blocks_over_least": blocks, "bytes_over_used": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("quality", "nodes"), default=("quality", "nodes"))
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for name, rows in (("quality", rows_of_quality), ("nodes", rows_of_nodes)):
        if name in args.only:
            found[name] = []
            for row in rows():
                found[name].append(row)
                shown = [f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()]
                if len(found[name]) == 1:
                    print(f"| {' | '.join(row)} |")
                print(f"| {' | '.join(shown)} |", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
