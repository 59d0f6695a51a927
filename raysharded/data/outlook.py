"""Repetitions of samples and sources, and limits of a mixture, as far as they are known before a run's first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysharded.config import BatchConfig
from raysharded.data.access.reader import HasWeights
from raysharded.display.quantities import count, listing


def outlook(data: Any, batch: BatchConfig, last_step: int) -> tuple[str, ...]:
    """Sentences on what a run up to `last_step` reads more than once. None for data that cannot be read here."""
    return (*repeated_samples(data, batch), *repeated_sources(data, batch, last_step))


def repeated_samples(data: Any, batch: BatchConfig) -> tuple[str, ...]:
    """A sentence if one step reads samples several times, as there are too few; none if the length is unknown."""
    try:
        length = len(data)
    except Exception:  # noqa: BLE001 - the boundary to the user's code; reading reports it in detail
        return ()
    if not 0 < length < batch.global_batch_size:
        return ()
    text = f"the data have {count(length, 'sample')}, and a step takes {batch.global_batch_size}"
    return (f"{text} (BatchConfig.global_batch_size): every step reads samples more than once",)


def repeated_sources(data: Any, batch: BatchConfig, last_step: int) -> tuple[str, ...]:
    """Sentences on sources that the steps up to `last_step` read more than once, or up to their limits.

    They hold for the mixture's own weights, without skipped data. None for other data, and for sources that cannot be
    read here.
    """
    if not isinstance(data, HasWeights):
        return ()
    mixture: Any = data
    try:
        ended, length = mixture.ended, len(mixture)
        sizes = {name: len(source) for name, source in mixture.sources.items()}
    except Exception:  # noqa: BLE001 - the boundary to storage and the user's code; a worker reports it in detail
        return ()
    end = min(last_step * batch.global_batch_size, length)
    limits = tuple(
        f"source {one.name!r} is read up to its max_epochs ({mixture.max_epochs[one.name]:g}) in step "
        f"{one.position // batch.global_batch_size + 1} of {last_step}: the others then continue in their proportions"
        for one in ended
        if one.position < end
    )
    return (*limits, *_epochs(mixture.counts(end), sizes, last_step))


def _epochs(counts: Mapping[str, int], sizes: Mapping[str, int], last_step: int) -> tuple[str, ...]:
    """A sentence on the sources of which more samples are read than they have."""
    times = {name: counts[name] / number for name, number in sizes.items() if counts[name] > number}
    if not times:
        return ()
    repeated = listing([f"{name!r} {number:.1f} times" for name, number in times.items()])
    return (f"up to step {last_step} the mixture reads source {repeated}, by its weights and lengths",)
