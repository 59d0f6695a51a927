"""The comparison of reads with peers: figures, raysharded's own readers, the peers' environments and programs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data_peers import OWN, SUBJECTS, Figures, Readers, Stores, Subject, figures_of, interval, summary
from benchmarks.epochs import Epoch
from benchmarks.result import ROOT
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter


def test_the_small_epoch_is_taken_from_the_large_one() -> None:
    epochs = {
        "small": Epoch(wall_s=3.0, cpu_s=2.0, tokens=1_000_000),
        "large": Epoch(wall_s=5.0, cpu_s=2.5, tokens=3_000_000),
    }
    sizes = {"small": 1_000_000, "large": 3_000_000}
    assert figures_of(epochs, sizes, 1.5) == Figures(tokens_per_s=1e6, cpu_s_per_million=0.25, load=1.5)
    assert not figures_of(epochs, sizes | {"large": 3_000_001}, 1.5).is_whole


@pytest.mark.parametrize(
    ("size", "first", "last"),
    [(1, 0, 0), (4, 0, 3), (5, 0, 4), (7, 0, 6), (8, 1, 6), (11, 2, 8), (20, 5, 14)],
)
def test_an_interval_is_the_narrowest_of_at_least_90_percent(size: int, first: int, last: int) -> None:
    assert interval([float(number) for number in range(size)]) == (first, last)


def test_ratios_are_of_the_same_round() -> None:
    def round_of(cpu_s: float, rate: float) -> Figures:
        return Figures(tokens_per_s=rate, cpu_s_per_million=cpu_s, load=0.0)

    own, peer = [round_of(1.0, 10.0), round_of(2.0, 5.0)], [round_of(3.0, 5.0), round_of(6.0, 2.5)]
    found = summary({OWN: own, "peer": peer})
    assert found["peer"]["cpu_over_own"] == {"median": 3.0, "interval_90": (3.0, 3.0)}
    assert found["peer"]["own_rate_over_its"] == {"median": 2.0, "interval_90": (2.0, 2.0)}


def test_a_round_without_all_tokens_does_not_count() -> None:
    own = [Figures(tokens_per_s=1.0, cpu_s_per_million=1.0, load=0.0)] * 2
    empty = Figures(tokens_per_s=1e9, cpu_s_per_million=0.0, load=0.0, is_whole=False)
    found = summary({OWN: own, "peer": [own[0], empty], "none": [empty, empty]})
    assert found["peer"]["whole_rounds"] == 1
    assert found["peer"]["cpu_s_per_million_tokens"] == 1.0
    assert found["none"] == {"rounds": 2, "whole_rounds": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStores(Stores):
    """Stores in a folder."""

    folder: Path

    def url(self, subject: Subject, name: str, endpoint_url: str) -> str:
        return str(self.folder / name)


@pytest.mark.procs
@pytest.mark.long
def test_two_own_readers_read_every_token_once_in_each_epoch(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 257, 64 * 32, dtype=np.uint32)
    with StoreWriter(str(tmp_path / "large"), Kind(tokenizer="random", vocab_size=257), 1000) as writer:
        writer.write(np.append(tokens, np.uint32(0)))
    stores = LocalStores(endpoint_url="", seq_len=32, totals={}, sizes={}, folder=tmp_path)
    with Readers(stores, replace(SUBJECTS[0], ranks=2), adds=True) as readers:
        for _ in range(2):
            epoch = readers.read("large")
            assert (epoch.tokens, epoch.total) == (64 * 32, int(tokens.sum()))
        with pytest.raises(RuntimeError, match="nothing"):
            readers.read("nothing")


def test_the_peers_programs_are_python_and_their_environments_have_the_torch_that_is_installed_first() -> None:
    pinned = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    for subject in SUBJECTS:
        if subject.environment:
            program = Path(subject.program[0])
            compile(program.read_text(encoding="utf-8"), str(program), "exec")
            lines = (ROOT / "benchmarks/environments" / f"{subject.environment}.txt").read_text().splitlines()
            assert pinned[1] in lines, subject
            assert all(line.startswith("#") or "==" in line for line in lines), subject
