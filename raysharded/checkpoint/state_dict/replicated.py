"""Comparison of tensors that several ranks hold whole under one name, if they are small. They should be copies.

One of the ranks writes such a tensor. If the others hold something else, such as a per-rank generator's state, it is
lost, and a warning is logged. Large tensors are not compared: every rank would have to read them completely.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from blake3 import blake3

from raysharded.checkpoint.state_dict.rank_merge import listed
from raysharded.checkpoint.state_dict.shard_boxes import Held
from raysharded.checkpoint.state_dict.staging import bytes_of

_log = logging.getLogger("raysharded.checkpoint")
_MAX_BYTES = 1 << 16
_MAX_TENSORS = 1024
_MAX_NAMES = 8


def digests_of(held: Sequence[Held]) -> dict[str, str]:
    """Digests of the small tensors that this rank holds whole, by name; only of the first 1,024."""
    found: dict[str, str] = {}
    for one in held:
        if len(found) == _MAX_TENSORS:
            break
        if len(one.parts) == 1 and one.parts[0].sizes == one.shape and one.local.nbytes <= _MAX_BYTES:
            found[one.name] = _digest(one.local)
    return found


def warn_of_differences(digests: Sequence[Mapping[str, str]]) -> None:
    """Log, once per process, the names of tensors that differ. `digests` has each rank's."""
    ranks: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(digests):
        for name, digest in own.items():
            ranks[name][digest].append(rank)
    differing = {name: by_digest for name, by_digest in ranks.items() if len(by_digest) > 1}
    if differing:
        name, by_digest = next(iter(differing.items()))
        others = [own[0] for own in by_digest.values()]
        _warn_once(tuple(differing), f"{name!r} differs on ranks {listed(others)}")


@lru_cache(maxsize=64)
def _warn_once(names: tuple[str, ...], example: str) -> None:
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    _log.warning(
        "tensors differ between the ranks that hold them, and only one rank's copy of each is stored: %s (%s). Give "
        "each rank's tensor its own key, as f'rng.{rank}'",
        shown,
        example,
    )


def _digest(tensor: torch.Tensor) -> str:
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return blake3(bytes_of(plain).data).hexdigest()[:32]
