"""From a task to a sharded model: parameters on the meta device, buffers computed, blocks wrapped.

Parameters are created on the meta device, so that a model larger than one worker's memory can be built. The
constructor computes buffers (RoPE tables) as usual. A process builds once; a generation wraps a tree of nodes in place
of the model's modules (`in_place/fsdp_tree.py`).

If a task does not choose the blocks that are units, they are the blocks of the model's outermost lists. A list may hold
lists: stages of blocks, as in Swin, ConvNeXt and U-Nets. FSDP2 gathers a unit's weights when its forward is called. So
the search descends into modules without a forward: a `ModuleList`, a `ModuleDict`, and a bare `nn.Module` that blocks
were assigned to. A `Sequential` has a forward, and is a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # torchtitan's choice, too
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from raysharded.actors.comm.device_mesh import DeviceMeshes
from raysharded.actors.in_place.fsdp_tree import FsdpTree, Origin, origin_of
from raysharded.actors.in_place.unit_hooks import UnitHooks
from raysharded.actors.model.construction import Construction, construct
from raysharded.actors.model.inventory import Inventory, inventory_of
from raysharded.actors.model.modes import kept_in_eval
from raysharded.actors.model.param_layout import ParamLayout
from raysharded.actors.model.parameter_marks import ParameterMarks, marks_of, refuse_hooks_on
from raysharded.actors.model.sharded_model import ShardedModel, clean_name, persistent_buffers
from raysharded.actors.model.tensor_parallel import parallelize
from raysharded.actors.model.unsharded_params import (
    allocate_scalars,
    lay_out_plainly,
    refuse_sparse_gradients,
    refuse_spread_scalars,
    scalars_of,
)
from raysharded.actors.task_calls.task_errors import naming
from raysharded.config import EngineConfig
from raysharded.errors import ConfigError, InexactError, TaskError
from raysharded.task import Strategy, Task, has_tensor_parallelism

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def default_units(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks with parameters in every outermost `ModuleList`, in order, with repeats."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _blocks_of(child)
        else:
            yield from default_units(child)


def has_forward(module: nn.Module) -> bool:
    """True if calling the module computes something."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _blocks_of(container: nn.Module) -> Iterator[nn.Module]:
    """Blocks of a container, repeated ones included, which `children` leaves out."""
    for block in container._modules.values():
        if block is None or next(block.parameters(), None) is None:
            continue
        if has_forward(block):
            yield block
        else:
            yield from _blocks_of(block)


def build_on_meta(task: Task, config: EngineConfig, seed: int) -> Construction:
    """The task's model with parameters on the meta device. `seed`: the seed of the run's constructors."""
    built = construct(task, seed)
    check_exactness(built.model, config)
    _check_buffers(task, built.model)
    return built


def find_units(task: Task, config: EngineConfig, model: nn.Module) -> list[nn.Module]:
    """The blocks that are units besides the root; they recompute activations if the configuration requests it."""
    blocks = blocks_to_wrap(task, model)
    return _checkpoint_blocks(model, blocks) if config.activation_checkpointing else blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """A model with parameters on the meta device, and the sharding of its units."""

    model: nn.Module
    blocks: list[nn.Module]
    strategies: dict[nn.Module, Strategy]
    tensor_dims: dict[str, int]
    """Parameter -> dimension, as in `ParamLayout`."""
    replicated: frozenset[str]
    """The parameters that every worker has whole."""
    origin: Origin
    """The model as it was built."""
    parameters: Mapping[str, nn.Parameter]
    """The model's parameters as it was built, without memory, by name."""
    hooks: tuple[UnitHooks, ...]
    """Hooks of the blocks and of the root."""
    marks: ParameterMarks = field(default_factory=ParameterMarks)
    inventory: Inventory = field(default_factory=Inventory)

    @property
    def whole(self) -> set[nn.Module]:
        """The blocks that every worker has whole."""
        return {block for block in self.blocks if self.strategies[block] == "replicate"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped:
    """The nodes of a model, wrapped by FSDP2, still without memory. The model itself is unchanged."""

    units: Units
    tree: FsdpTree
    cuts: ParamLayout
    whole_names: set[str]


def build_sharded(
    task: Task, config: EngineConfig, axes: DeviceMeshes, device: torch.device, seed: int = 0
) -> ShardedModel:
    """Build the task's model for these meshes. Parameters and gradients hold garbage until the state is loaded."""
    return allocate(wrap(build_units_of(task, config, axes, seed), config, axes), device)


def build_units_of(
    task: Task, config: EngineConfig, axes: DeviceMeshes | None, seed: int = 0, built: Construction | None = None
) -> Units:
    """Units of the task's model, from all methods of the task that concern it. `built`: the model, if it is built.

    `axes`: may be None if the task has no tensor parallelism; `seed`: the seed of the run's constructors.
    """
    built = built or build_on_meta(task, config, seed)
    model, inventory = built.model, inventory_of(task, built)
    marks = marks_of(task, {clean_name(name): param for name, param in model.named_parameters()})
    lay_out_plainly(model)
    dims = _apply_tensor_parallelism(task, model, axes, seed)
    refuse_spread_scalars(task, model)
    refuse_hooks_on(task, marks, dims)
    blocks = find_units(task, config, model)
    _check_parameters(task, model, blocks)
    strategies = strategies_of(task, config, model, blocks)
    parameters = {clean_name(name): param for name, param in model.named_parameters()}
    replicated = _parameters_of(model, blocks, {block for block in blocks if strategies[block] == "replicate"})
    replicated |= {name for name, param in parameters.items() if not param.dim()}
    if cut_and_whole := sorted(replicated & dims.keys()):
        raise ConfigError(
            f"{type(task).__name__}.strategy replicates {cut_and_whole[0]!r}, which {type(task).__name__}.parallelize "
            "cuts; do one of both."
        )
    return Units(
        model=model,
        blocks=blocks,
        strategies=strategies,
        tensor_dims=dims,
        replicated=replicated,
        origin=origin_of(model),
        parameters=parameters,
        hooks=tuple(UnitHooks(module) for module in (*blocks, model)),
        marks=marks,
        inventory=inventory,
    )


def wrap(units: Units, config: EngineConfig, axes: DeviceMeshes) -> Wrapped:
    """Wrap nodes of the model and of its blocks as FSDP2's units. Calls no code of the task."""
    model, blocks, strategies, whole = units.model, units.blocks, units.strategies, units.whole
    tree = FsdpTree(model, units.origin)
    if config.compile:
        for block in blocks:
            if block._compiled_call_impl is None:
                block.compile()
    of_units, of_root = (mixed_precision(config, is_root=is_root) for is_root in (False, True))
    whole_names = {clean_name(name) for name, module in model.named_modules() if module in whole}
    mesh = axes.data
    own_mesh = axes.alone() if whole else mesh
    scalars = scalars_of(tree.root)  # the model may be computing with others
    for block in blocks:
        frees, block_mesh = strategies[block] == "full", own_mesh if block in whole else mesh
        fully_shard(
            tree.node_of(block),
            mesh=block_mesh,
            mp_policy=of_units,
            reshard_after_forward=frees,
            ignored_params=scalars or None,
        )
    fully_shard(tree.root, mesh=mesh, mp_policy=of_root, ignored_params=scalars or None)
    cuts = ParamLayout(degree=axes.degree, tensor_dims=units.tensor_dims, replicated=units.replicated)
    return Wrapped(units=units, tree=tree, cuts=cuts, whole_names=whole_names)


def mixed_precision(config: EngineConfig, *, is_root: bool) -> MixedPrecisionPolicy:
    """The dtypes in which FSDP2 computes and reduces the root, or the other units."""
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[str(config.param_dtype)] if config.param_dtype else None,
        reduce_dtype=DTYPES[str(config.reduce_dtype)] if config.param_dtype else None,
        cast_forward_inputs=casts_inputs(config, is_root=is_root),
    )


def casts_inputs(config: EngineConfig, *, is_root: bool) -> bool:
    """True if the floating-point inputs of the root, or of the other units, are cast to `param_dtype`."""
    return config.cast_inputs == "all" or (config.cast_inputs == "units" and not is_root)


def allocate(wrapped: Wrapped, device: torch.device) -> ShardedModel:
    """Give wrapped nodes their memory, and FSDP2 the settings of the canonical sum; let the model compute with them."""
    model, root, hooks = wrapped.units.model, wrapped.tree.root, wrapped.units.hooks
    allocate_scalars(root, device)
    root._apply(lambda tensor: _materialise(tensor, device))
    by_module = {each.module: each for each in hooks}
    named = [(clean_name(name), by_module[m]) for name, m in model.named_modules() if m in by_module]
    named.sort(key=lambda one: one[0] == "")
    units = tuple((name, wrapped.tree.unit_of(each.module)) for name, each in named)
    for _, unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    whole = wrapped.tree.unit_of(model)
    if hasattr(whole, "set_reduce_scatter_unused_params"):
        whole.set_reduce_scatter_unused_params(True)
    wrapped.tree.attach(hooks)
    parameters = {clean_name(name): param for name, param in model.named_parameters()}
    wrapped.units.marks.put_on(parameters)
    return ShardedModel(
        model=model,
        tree=wrapped.tree,
        units=units,
        hooks=tuple(named),
        parameters=parameters,
        marks=wrapped.units.marks,
        inventory=wrapped.units.inventory,
        persistent_buffers={clean_name(name): buffer for name, buffer in persistent_buffers(model)},
        cuts=wrapped.cuts,
        replicated_units=frozenset(name for name, _ in units if name in wrapped.whole_names),
    )


def _apply_tensor_parallelism(task: Task, model: nn.Module, axes: DeviceMeshes | None, seed: int) -> dict[str, int]:
    """Parameter -> the dimension that is cut, or that a higher degree would cut in a later generation."""
    if axes is not None and axes.tensor is not None:
        return parallelize(task, model, axes.tensor)
    if not has_tensor_parallelism(task):
        return {}
    assert axes is not None
    return parallelize(task, construct(task, seed).model, axes.alone())


def _parameters_of(model: nn.Module, blocks: Sequence[nn.Module], chosen: Collection[nn.Module]) -> frozenset[str]:
    """The names of the parameters that some of the blocks hold; `blocks` has inner ones before outer ones."""
    holder = _holders(blocks)
    return frozenset(clean_name(name) for name, param in model.named_parameters() if holder.get(id(param)) in chosen)


def _holders(blocks: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """Id of a parameter -> the innermost block that has it; `blocks` has inner ones before outer ones."""
    holder: dict[int, nn.Module] = {}
    for block in blocks:
        for param in block.parameters():
            holder.setdefault(id(param), block)
    return holder


def _check_parameters(task: Task, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuse parameters that FSDP2 cannot shard, or not together; it never shards scalars."""
    refuse_sparse_gradients(task, model)
    holder, where = _holders(blocks), f"in {type(task).__name__}.build_model"
    first: dict[nn.Module | None, tuple[str, torch.dtype]] = {}
    for name, param in ((clean_name(name), param) for name, param in model.named_parameters()):
        if not param.requires_grad or not param.dim():
            continue
        if param.numel() == 0:
            raise TaskError(
                f"parameter {name!r} of shape {tuple(param.shape)} has no elements, and an empty gradient cannot "
                f"be summed. Leave it out {where}, or freeze it (requires_grad=False)."
            )
        other, dtype = first.setdefault(holder.get(id(param)), (name, param.dtype))
        if param.dtype != dtype:
            raise TaskError(
                f"parameter {name!r} is {param.dtype} and {other!r} in the same unit {dtype}; the gradients of a unit "
                f"are summed together. Give both one dtype {where} (EngineConfig.param_dtype sets the dtype of the "
                "computation), freeze one of them, or let Task.wrap make units of one dtype each."
            )


def strategies_of(
    task: Task, config: EngineConfig, model: nn.Module, blocks: Sequence[nn.Module]
) -> dict[nn.Module, Strategy]:
    """Block -> its strategy: the task's choice, or else the setting."""
    usual: Strategy = "full" if config.reshard_after_forward else "gradients"
    names = {module: clean_name(name) for name, module in model.named_modules()}
    strategies = {}
    for block in blocks:
        own = block._checkpoint_wrapped_module if isinstance(block, CheckpointWrapper) else block
        assert isinstance(own, nn.Module)
        with naming(f"{type(task).__name__}.strategy"):
            strategy = task.strategy(names[block], own)
        if strategy not in (None, "full", "gradients", "replicate"):
            raise ConfigError(
                f"{type(task).__name__}.strategy returned {strategy!r} for {names[block]!r}; return 'full', "
                "'gradients', 'replicate' or None."
            )
        strategies[block] = strategy or usual
    return strategies


def _materialise(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def _check_buffers(task: Task, model: nn.Module) -> None:
    """Refuse buffers without values, except persistent ones that get theirs from a model that was built whole."""
    persistent = {name for name, _ in persistent_buffers(model)}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and (name not in persistent or task.init_weights is not None):
            raise TaskError(
                f"buffer {name!r} is computed from parameters, which have no values while "
                f"{type(task).__name__}.build_model runs. Compute it in forward, or from something else."
            )


def blocks_to_wrap(task: Task, model: nn.Module) -> list[nn.Module]:
    """The task's choice of blocks, or the blocks of every outermost `ModuleList`, also of lists in it.

    By default a block whose parameters are tied to a module outside it is left to its parent: FSDP2 would untie them
    silently. A block that occurs several times is left to its parent, too: a unit can be used once per forward.
    """
    with naming(f"{type(task).__name__}.wrap"):
        chosen = task.wrap(model)
    if chosen is None:
        times = Counter(default_units(model))
        return [block for block, count in times.items() if count == 1 and not _tied_outside(model, block)]
    chosen = list(dict.fromkeys(chosen))
    inside = set(model.modules())
    for block in chosen:
        if block not in inside or block is model:
            raise ConfigError(
                f"{type(task).__name__}.wrap returned {type(block).__name__}, which is not inside the model; return "
                "submodules of it."
            )
        if not has_forward(block):
            raise ConfigError(
                f"{type(task).__name__}.wrap returned a {type(block).__name__}, which has no forward, and a unit's "
                "weights are gathered when its forward is called; return the blocks in it."
            )
        if tied := _tied_outside(model, block):
            raise ConfigError(
                f"{type(task).__name__}.wrap returned a {type(block).__name__} whose parameter {tied!r} is shared with "
                "a module outside it; FSDP2 would untie them silently. Leave the block out (its parent then holds "
                "both)."
            )
    order = {module: place for place, module in enumerate(model.modules())}
    return sorted(chosen, key=order.__getitem__, reverse=True)  # FSDP2 wants inner modules first


def _tied_outside(model: nn.Module, block: nn.Module) -> str | None:
    inside = set(block.modules())
    own = {id(param) for param in block.parameters() if param.dim()}  # FSDP2 leaves scalars as they are
    for name, module in model.named_modules():
        if module not in inside:
            for local, param in module.named_parameters(recurse=False):
                if id(param) in own:
                    return f"{name}.{local}" if name else local
    return None


def _checkpoint_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    wrapped = {block: checkpoint_wrapper(block, preserve_rng_state=True) for block in blocks}
    for module in list(model.modules()):
        if not isinstance(module, tuple({type(w) for w in wrapped.values()})):
            for name, child in list(module.named_children()):
                if child in wrapped:
                    setattr(module, name, wrapped[child])
    return list(wrapped.values())


def check_exactness(model: nn.Module, config: EngineConfig) -> None:
    """Refuse, in exact mode, batch norm with running statistics, except in frozen parts in eval mode."""
    if config.reduction != "exact":
        return
    in_eval = kept_in_eval(model)
    for name, module in model.named_modules():
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if is_norm and module not in in_eval:
            raise InexactError(
                f"{name or 'the model'} is a {type(module).__name__}: its running statistics change in forward and "
                "depend on which worker sees which samples. Use LayerNorm, GroupNorm or RMSNorm, set "
                "track_running_stats=False, freeze it and put it in eval() in build_model, "
                'or accept results without identical bits with EngineConfig(reduction="fast").'
            )
