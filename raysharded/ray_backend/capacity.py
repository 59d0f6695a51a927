"""The number of workers that the connected cluster can hold, as it is. Knows Ray."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raysharded.config import ScalingConfig
from raysharded.display.quantities import count, duration, listing
from raysharded.errors import ClusterError

_log = logging.getLogger("raysharded.driver")
_MODEL = "accelerator_type:"
"""Beginning of the resource by which Ray names a node's model of GPU."""


@dataclass(frozen=True, slots=True)
class _TooFew:
    """A resource of which the cluster has too little for the minimum of workers, even if nothing else runs there."""

    resource: str
    amount: float
    """Amount that each worker needs."""
    have: float
    fits: int
    """Number of workers for which it is enough."""


def refuse_the_impossible(scaling: ScalingConfig) -> None:
    """Raise ClusterError if a cluster that was started here, which does not grow, is too small."""
    lack = _lack(scaling)
    if lack is not None:
        enough = math.floor(100 * lack.have / scaling.min_workers) / 100
        less = f" (cpus_per_worker={enough:g})" if lack.resource == "CPU" and enough else ""
        raise ClusterError(
            f"the run needs at least {_needed(scaling, lack)}, and this machine has {lack.have:g} {lack.resource}: "
            f"enough for {lack.fits}. {_why_no_gpu(lack)}Lower the minimum in ScalingConfig.num_workers, require less "
            f"per worker{less}, or use a larger cluster: RAY_ADDRESS=HOST:PORT names one."
        )


def _why_no_gpu(lack: _TooFew) -> str:
    """The reason that a machine has no GPU for Ray, as a sentence with a space behind it; empty if it has some."""
    if lack.resource != "GPU" or lack.have:
        return ""
    from raysharded.actors.device.accelerator import accelerator

    why = accelerator().why_unusable() or "Ray counts those that NVML and CUDA_VISIBLE_DEVICES show as it starts"
    return f"No GPU can be used here: {why}. "


def warn_of_too_few(scaling: ScalingConfig) -> None:
    """Log a warning if a cluster that may grow is too small as it is."""
    lack = _lack(scaling)
    if lack is not None:
        _log.warning(
            "the run needs at least %s, and the cluster as it is has %g %s: enough for %d. The run waits up to %s for "
            "nodes to be added (ScalingConfig.start_timeout_s).",
            _needed(scaling, lack),
            lack.have,
            lack.resource,
            lack.fits,
            duration(scaling.start_timeout_s),
        )


def warn_of_different_gpus(scaling: ScalingConfig, *, exact: bool) -> None:
    """Log a warning if the cluster's GPUs are of different models: an exact run needs one.

    None if each worker requires a model (`resources_per_worker`).
    """
    if not (scaling.use_gpu and exact):
        return
    found = gpu_models([node for node in ray.nodes() if node["Alive"]])
    if len(found) > 1 and not any(one.startswith(_MODEL) for one in scaling.resources_per_worker):
        _log.warning("%s", different_gpus_text(found))


def gpu_models(nodes: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Model of GPU, as Ray names it -> names of the nodes that have it. `nodes`: as `ray.nodes` returns them."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        for resource in node["Resources"]:
            if resource.startswith(_MODEL) and node["Resources"].get("GPU"):
                found.setdefault(resource.removeprefix(_MODEL), []).append(node["NodeManagerHostname"])
    return found


def different_gpus_text(models: Mapping[str, Sequence[str]]) -> str:
    """The sentences on a cluster whose GPUs are of these models."""
    told = "; ".join(f"{model} on {listing(sorted(nodes))}" for model, nodes in sorted(models.items()))
    first = min(models)
    return (
        f"the cluster has different GPUs: {told}. All workers of a run need the same model for the same bits: those "
        "on another one than the first worker's are refused. Choose one with "
        f"ScalingConfig(resources_per_worker={{{_MODEL + first!r}: 0.001}})."
    )


def _needed(scaling: ScalingConfig, lack: _TooFew) -> str:
    return f"{count(scaling.min_workers, 'worker')} with {lack.amount:g} {lack.resource} each"


def _lack(scaling: ScalingConfig) -> _TooFew | None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, amount in needs_of(scaling).items():
        fits = sum(int(node.get(name, 0) / amount + 1e-9) for node in nodes)
        if fits < scaling.min_workers:
            return _TooFew(name, amount, sum(node.get(name, 0) for node in nodes), fits)
    return None


def needs_of(scaling: ScalingConfig) -> dict[str, float]:
    """Resource -> amount that one worker takes."""
    needs = {"CPU": scaling.cpus_per_worker, "GPU": 1.0 if scaling.use_gpu else 0.0}
    return {name: amount for name, amount in (needs | scaling.resources_per_worker).items() if amount}


def shortage_text(
    needs: Mapping[str, float],
    min_workers: int | None,
    have: Mapping[str, float],
    free: Mapping[str, float],
    avoided: Sequence[str] = (),
    *,
    lost: Sequence[str] = (),
    where: str = "the cluster",
) -> str:
    """Sentences about what a run lacks: resources that its place has not, or that others use there now.

    `min_workers`: the number without which the run waits; None: it trains. `where`: the place. `avoided`: ids of nodes
    that get no workers, which the resources include; `lost`: descriptions of those that the cluster has and this
    process cannot reach.
    """
    parts = [
        f"{amount:g} {name} ({where} has {have.get(name, 0):g}, {free.get(name, 0):g} free)"
        for name, amount in needs.items()
    ]
    text = f"Each worker needs {' and '.join(parts)}."
    if lost:
        text += f" No worker is placed on {'; nor on '.join(lost)}; retried every few seconds."
    if avoided:
        nodes = ", ".join(node_id[:8] for node_id in avoided)
        text += f" No worker is placed on {nodes}: drained by request, or failed too often or just now."
    if lost or avoided or min_workers is None:
        return text
    if any(have.get(name, 0) < amount * min_workers for name, amount in needs.items()):
        return text
    return f"{text} That is enough for the run: it starts when what others use now is free."
