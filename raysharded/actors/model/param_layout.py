"""How each parameter lies over the workers, and with it all that is kept for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from raysharded.layout import TensorSpec, strips_of, tensor_specs

MODEL, BUFFER, OPTIM, NUMBER = "model.", "buffer.", "optim.", "number."
"""What names of the state begin with: `model.<parameter>`, `buffer.<buffer>`, `optim.<parameter>.<key>`, and
`number.<parameter>.<key>` for what an optimizer keeps as a Python number."""
CONSTANT = "constant."
"""The same, of what the constructor drew and keeps beside parameters and buffers: `constant.<path>`."""


class Replication(Enum):
    """Who has the same part of a parameter, apart from other replicas."""

    ONE = "one"
    TENSOR_GROUP = "tensor group"
    EVERYONE = "everyone"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamLayout:
    """Of one generation's model, by the names of its parameters."""

    degree: int = 1
    """Of tensor parallelism."""
    tensor_dims: Mapping[str, int] = field(default_factory=dict)
    """The dimension that tensor parallelism cuts, or would cut; parameters that it leaves whole are not named."""
    replicated: frozenset[str] = frozenset()
    """Those that every worker has whole."""

    def holders(self, parameter: str) -> Replication:
        """Who has the same part of it."""
        if parameter in self.replicated:
            return Replication.EVERYONE
        return Replication.TENSOR_GROUP if self.degree > 1 and parameter not in self.tensor_dims else Replication.ONE

    def specs(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """A tensor of the state, given its name in it: one entry, or one for each of its strips."""
        prefix, _, rest = name.partition(".")
        prefix += "."
        parameter = rest if prefix == MODEL else rest.rpartition(".")[0]
        replicated = prefix in (BUFFER, CONSTANT) or parameter in self.replicated
        dim = None if replicated or not shape else self.tensor_dims.get(parameter)
        strips = strips_of(shape[dim], self.degree) if dim else 1
        return tensor_specs(name, dtype, shape, replicated=replicated, tensor_dim=dim, strips=strips)
