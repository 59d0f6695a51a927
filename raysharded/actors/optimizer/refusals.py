"""Messages for optimizers that are rejected after their trial. Pure."""

from __future__ import annotations

import torch

from raysharded.actors.optimizer.trial import Finding


def cannot_be_kept(optimizer: torch.optim.Optimizer, found: Finding) -> str:
    """Message that no other worker can get the optimizer's state, with the remedy."""
    name = type(optimizer).__name__
    if found.kind == "idle":
        return (
            f"a step of {name} does not change the parameters of its groups, when it is tried with parameters and "
            "gradients of raysharded's: it seems to have others. Let step() change those in param_groups, by their "
            ".grad."
        )
    if found.kind == "shape":
        return (
            f"{name} keeps {found.what}: it cannot be handed on when the number of workers changes, in exact mode "
            "or in fast mode. Use one whose state has the shapes of the parameters: AdamW, whose 8 bytes for each "
            "parameter are divided among the workers, or SGD with momentum, which keeps half of that; in fast mode "
            '(EngineConfig(reduction="fast")) Muon, too.'
        )
    if found.kind == "key":
        return (
            f"{_who(optimizer, found)} keeps state of a parameter under {found.what}: that has no name in a "
            "checkpoint. Let each key of optimizer.state[parameter] be a text without '.' and ':'."
        )
    if found.kind == "marks":
        return (
            f"a step of {name} depends on attributes of the parameters ({found.what}): it steps parts of parameters, "
            "which do not have them. Read attributes where the optimizer is built, and give what they select as groups "
            "of the optimizer, with a rate or a setting of each."
        )
    if found.kind == "turned":
        return (
            f"{_who(optimizer, found)} turns {found.what} after its first step: where workers change, it would be "
            "converted back. Let each entry of optimizer.state[parameter] have one type from its first step on, as "
            "0.0 for a number that becomes a fraction."
        )
    what = (
        f"makes {found.what!r} of its state after its first step"
        if found.kind == "late"
        else (f"changes {found.what} in its steps" if found.what else "keeps hidden state")
    )
    return (
        f"{_who(optimizer, found)} {what}: a worker that joins, or takes another's place, would not have it. Let it "
        "keep all state in optimizer.state[parameter], as tensors or numbers, from its first step on. No tensor there "
        "may share its memory with another one, or with a parameter."
    )


_UNEVEN = {
    "zero": "skips a parameter whose gradient is zero, or treats it unlike others",
    "large": "treats a parameter with large numbers in its gradient unlike others, as by skipping or scaling it",
    "empty": "skips a parameter without elements, or keeps another state of it",
}
_BY_ELEMENT = "Step all parameters that have a .grad, and decide for each element alone, as by torch.where"
_WAYS_OUT = {
    "zero": _BY_ELEMENT,
    "large": _BY_ELEMENT,
    "empty": "Step all parameters that have a .grad, and make the state of empty ones, too",
}


def depends_on_the_cut(optimizer: torch.optim.Optimizer, found: Finding) -> str:
    """Message that the number of workers would change the optimizer's results, with the remedy."""
    settings = {k: v for k, v in optimizer.defaults.items() if k in ("foreach", "fused")}
    if found.kind in _UNEVEN and not settings.get("fused"):  # these may round otherwise there
        where = f"in {found.what!r} of the state" if found.what else "in the weights"
        return (
            f"{_who(optimizer, found)} {_UNEVEN[found.kind]}. A worker's part of a parameter may be such a one, so the "
            f"number of workers would show {where}. {_WAYS_OUT[found.kind]}; or accept results without identical bits "
            'with EngineConfig(reduction="fast").'
        )
    start = _who(optimizer, found) if found.hooks else f"{_who(optimizer, found)} with {settings}"
    if found.what:
        keep = "Keep in optimizer.state[parameter] what is computed element by element, or a number that does not "
        keep = "Pass foreach=True, fused=False to it" if settings.get("fused") else f"{keep}depend on the gradient"
        return (
            f"{start} keeps another {found.what!r} of a shard than of the whole tensor, so the number of workers "
            f"would show in the state. {keep}; or accept results without identical bits with "
            'EngineConfig(reduction="fast").'
        )
    way_out = (
        "Clip by Task.max_grad_norm, and change gradients element by element alone, "
        if found.hooks
        else "Pass foreach=True, fused=False to it (and keep its state in float32), "
    )
    return (
        f"{start} gives other bits on a shard than on the whole tensor, so the number of workers would show in the "
        f'weights. {way_out}or accept results without identical bits with EngineConfig(reduction="fast").'
    )


def _who(optimizer: torch.optim.Optimizer, found: Finding) -> str:
    name = type(optimizer).__name__
    return f"{' or '.join(found.hooks)} of {name}" if found.hooks else name
