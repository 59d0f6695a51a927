"""Memory of a GPU that NCCL takes for its communicators, outside of torch's allocator. Pure; estimates.

The figures are of one public report (NVIDIA/nccl#1685), of 8 H100s: 1.06 GB for a communicator with its rings, and 4.34
GB after its first all-to-all, with 32 channels to each of 7 peers. Between nodes 2 channels to a peer are assumed. No
GPU has run raysharded: `nvidia-smi` shows the real use, and `NCCL_MAX_P2P_NCHANNELS` limits the channels.
"""

from __future__ import annotations

from dataclasses import replace

from raysharded.layout import Mesh
from raysharded.planning.memory.footprint import Setting, WorkerMemory

KIND = "communicators"
RING_BYTES = 1_060_000_000
"""Memory of a process with one communicator that has sent nothing from peer to peer."""
CHANNEL_BYTES = (4_340_000_000 - RING_BYTES) // (7 * 32)
"""Buffers of one channel to one peer, in both directions."""
CHANNELS_IN_NODE, CHANNELS_BETWEEN = 32, 2


def nccl_bytes(setting: Setting, layout: Mesh, workers_per_node: int) -> int:
    """Bytes of NCCL's buffers on one GPU, in a layout whose nodes have so many workers; 0 on CPUs, and for one worker.

    Exact reduction exchanges gradients from peer to peer: see `_peers`. Replicas exchange with one worker of each other
    one. All-gathers, and the fast reduction, go around rings. Communicators beside the first are not counted: those of
    replicas, and of all workers.
    """
    if not setting.on_gpu or layout.world_size == 1:
        return 0
    if setting.engine.reduction != "exact":
        return RING_BYTES
    inside, between = _peers(layout.data.shards, max(1, workers_per_node // layout.tensor))
    between += layout.replicas - 1
    return RING_BYTES + CHANNEL_BYTES * (inside * CHANNELS_IN_NODE + between * CHANNELS_BETWEEN)


def _peers(members: int, per_node: int) -> tuple[int, int]:
    """(peers on the node, peers on other nodes) of one member of a shard group of so many.

    As `actors.reduction.gradient_exchange.Exchange`. Where a node has several members and is not alone, they add up
    their gradients, each for some of the shards in a row:

    - A member sends the sums to as many others as it has added up for: about as many as a node has.
    - It gets those of the shard that it holds from one member of each other node.

    Otherwise each member exchanges with all others.
    """
    inside = min(members, per_node) - 1
    others = members - 1 - inside
    if inside == 0 or others == 0:
        return inside, others
    other_nodes = -(-others // per_node)
    return inside, min(others, other_nodes + per_node)


def with_nccl(memory: WorkerMemory, setting: Setting, layout: Mesh, workers_per_node: int) -> WorkerMemory:
    """The memory of a worker with NCCL's buffers, in a layout whose nodes have so many workers."""
    size = nccl_bytes(setting, layout, workers_per_node)
    phases = {phase: most + size for phase, most in memory.phases.items()}
    return replace(memory, kinds={**memory.kinds, KIND: size}, phases=phases)
