"""The layout of each parameter, and of its state, over the workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from raysharded.layout import TensorSpec, strips_of, tensor_specs

MODEL, BUFFER, OPTIM, NUMBER = "model.", "buffer.", "optim.", "number."
"""Prefixes of names in the state: `model.<parameter>`, `buffer.<buffer>`, `optim.<parameter>.<key>`.

`number.<parameter>.<key>` is optimizer state that is a Python number.
"""
CONSTANT = "constant."
"""Prefix of a drawn constant in the state: `constant.<path>`."""


class Replication(Enum):
    """The workers that hold the same part of a parameter, not counting other replicas."""

    ONE = "one"
    TENSOR_GROUP = "tensor group"
    EVERYONE = "everyone"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamLayout:
    """Layout of one generation's parameters, by name."""

    degree: int = 1
    """Degree of tensor parallelism."""
    tensor_dims: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> the dimension that tensor parallelism cuts, or would cut; without parameters left whole."""
    replicated: frozenset[str] = frozenset()
    """The parameters that every worker has whole."""

    def holders(self, parameter: str) -> Replication:
        """The workers that hold the same part of a parameter."""
        if parameter in self.replicated:
            return Replication.EVERYONE
        return Replication.TENSOR_GROUP if self.degree > 1 and parameter not in self.tensor_dims else Replication.ONE

    def specs(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """Specs of a tensor of the state, by its name there: one, or one for each of its strips."""
        prefix, _, rest = name.partition(".")
        prefix += "."
        parameter = rest if prefix == MODEL else rest.rpartition(".")[0]
        replicated = prefix in (BUFFER, CONSTANT) or parameter in self.replicated
        dim = None if replicated or not shape else self.tensor_dims.get(parameter)
        strips = strips_of(shape[dim], self.degree) if dim else 1
        return tensor_specs(name, dtype, shape, replicated=replicated, tensor_dim=dim, strips=strips)
