"""Explanations of torch's errors for the author of a task: the cause, and the way out. Pure.

Errors are recognized by pieces of torch's messages. An unknown error has no explanation. It is shown as it is, without
the lists of kernels that some contain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from raysharded.errors import text_of

During = Literal["build", "build_optimizer", "loss", "backward", "step", "ahead", "behind"]
"""The failed call: `build_model`, `build_optimizer`, `loss` or `evaluate`, a loss's backward, an optimizer's step. In a
user's function: ahead of `session.shard`, behind a step."""
_MOST_CHARACTERS = 400
_TABLE = re.compile(
    r" (This could be because the operator doesn't exist|'[\w:.]+' is only available for these backends).*", re.DOTALL
)
_HINTS = re.compile(r" (Hint: enable anomaly detection|Hint: the backtrace further above).*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Known:
    during: tuple[During, ...]
    pieces: str
    """Pattern that the message contains."""
    sentence: str


_NO_VALUES = (
    "while raysharded builds the model, its parameters are on the meta device: they have shapes and no values. Give "
    "them their values in Task.init_weights, or compute in forward what is made of them; in build_model, set none from "
    "a tensor, read none (.item(), .numpy(), if), and load none."
)
_OUTSIDE_FORWARD = (
    "a weight of the model was used outside of the model's forward, where each worker has a part of it alone. Call "
    "model(...), and compute in forward what needs weights: give forward an argument that selects the result, in "
    "place of calling a submodule, or another method. A sum over model.parameters() in the loss is weight decay: give "
    "it to the optimizer (weight_decay=)."
)
_FREED = "the weights of a unit were freed after its forward and not gathered for its backward."
_FREED_BY = (
    f"{_FREED} A gradient of a gradient (create_graph=True) does that, which sharded weights do not have; so does the "
    "output of a unit that is changed in place (write x = x + y for x += y)."
)
_SPARSE = (
    "sparse gradients cannot be sharded, nor added in one order: leave out sparse=True (of nn.Embedding, "
    "nn.EmbeddingBag or F.embedding). The gradient is the same, dense."
)
_MUON = (
    "Muon takes matrices alone, and computes with each of them whole: in exact mode it is refused, since a worker has "
    'some rows of each. In fast mode (EngineConfig(reduction="fast")) give it the matrices and another optimizer the '
    "rest, both in one class; or use AdamW for all."
)
_AHEAD = (
    "the model of session.build has no values before session.shard, and its parameters cannot be replaced. Build it "
    "with all its parts in the function that session.build calls, as an adapter of low rank: session.build(lambda: "
    "get_peft_model(make(), config))."
)
_IN_PARTS = (
    "each worker has a part of the model. Write it by the adapter's way, as trainer.save_model(folder), and merge it, "
    "or generate, from that folder; or export a checkpoint of the run."
)
_KNOWN = (
    _Known(("ahead",), r"meta tensor|meta device|device meta|'Meta' backend|set_data", _AHEAD),
    _Known(("behind",), r"got mixed torch\.Tensor and DTensor|on an invalid python storage", _IN_PARTS),
    _Known(("build",), r"meta tensor|meta device|device meta|'Meta' backend|set_data", _NO_VALUES),
    _Known(("build",), r"Cannot copy out of|Expected a 'cpu' device type .* but found 'meta'", _NO_VALUES),
    _Known(
        ("loss", "backward"),
        r"device meta|meta device|meta tensor",
        "a tensor without values took part: it was made from parameters in build_model, where those are on the meta "
        "device. Make it in forward, or of something else.",
    ),
    _Known(("loss", "backward"), r"got mixed torch\.Tensor and DTensor", _OUTSIDE_FORWARD),
    _Known(("backward",), r"storage of size 0", _FREED_BY),
    _Known(
        ("backward",),
        r"does not require grad and does not have a grad_fn",
        "the loss does not depend on any trainable parameter (a detach(), a no_grad(), a constant). Where a microbatch "
        "has nothing to learn from, return Loss(total, 0).",
    ),
    _Known(
        ("backward",),
        r"backward through the graph a second time",
        "the graph of the loss was freed. raysharded calls backward itself, once for each microbatch: do not call "
        "backward() in the loss, and keep nothing with a graph for the next microbatch (detach() it).",
    ),
    _Known(
        ("backward",),
        r"modified by an inplace operation",
        "a tensor that backward needs was changed in place after it was used (x += y, x[...] = y, relu_()). Write "
        "x = x + y, or change a clone().",
    ),
    _Known(("loss", "backward"), r"Sparse(CPU|CUDA)|[Ss]parse tensors? .*not support", _SPARSE),
    _Known(
        ("step",),
        r"closure",
        "it wants a closure that computes the loss again, as LBFGS does, and a step computes it once. Use an optimizer "
        "whose step() works without: SGD, Adam, AdamW.",
    ),
    _Known(("build_optimizer",), r"Muon only supports 2D parameters", _MUON),
    _Known(
        ("build_optimizer",),
        r"got mixed torch\.Tensor and DTensor",
        "each worker has a part of each parameter here, as a DTensor: make no tensors of the parameters' values in "
        "build_optimizer, but in the optimizer's first step.",
    ),
)


def explanation(error: BaseException, during: During) -> str | None:
    """Meaning of an error in a task, with the way out; None if it is unknown."""
    text = text_of(error)
    return next((one.sentence for one in _KNOWN if during in one.during and re.search(one.pieces, text)), None)


def without_tables(text: str) -> str:
    """A message without torch's lists of kernels, and without hints that do not apply here."""
    return _HINTS.sub("", _TABLE.sub("", text))


def shortened(text: str) -> str:
    """A message without lists, cut to a few lines."""
    text = without_tables(text)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS].rstrip()} ..."


def narrowed(message: str, suspects: str) -> str:
    """A message about freed weights with a sentence that names the unit; any other message unchanged."""
    return message.replace(_FREED_BY, f"{_FREED} {suspects}") if suspects else message


def about_optimizer(optimizer: object) -> str:
    """Explanation of an optimizer that does not take all parameters; begins with a space unless it is empty."""
    return f" {_MUON}" if type(optimizer).__name__ == "Muon" else ""
