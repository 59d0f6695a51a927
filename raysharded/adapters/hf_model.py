"""The model of an elastic Hugging Face `Trainer`: the one of `session.build`, and whole where a script writes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from raysharded.actors.session.held_out import built_by, leave_modes_to_loop, weights_of
from raysharded.actors.task_calls.object_contents import NotFollowed
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.adapters.hf_arguments import require_built, require_to_build
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Trainer as Base

    from raysharded.actors.session.user_session import Session
    from raysharded.adapters.hf_loop import Loop
else:
    Base = object

_OF_A_WHOLE_ONE = ("generate", "merge_adapter", "merge_and_unload", "unload")
"""Methods of PEFT's models that read or replace values of the base model's modules."""


class Built(Base):
    """The trainer's constructor, which takes the model that the session has built."""

    session: Session
    _loop: Loop | None = None
    """Registered state; None before `train`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name, built = type(self).__name__, built_by(self.session)
        try:
            given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        except TypeError:  # the constructor itself raises the error
            given = {}
        require_to_build(name, given.get("model"), given.get("peft_config"), built)
        super().__init__(*args, **kwargs)
        require_built(name, self.model, built)
        leave_modes_to_loop(self.session)
        setattr(self.accelerator, "print", self._print)  # noqa: B010 - mypy refuses to assign to a method

    def _print(self, *args: Any, **kwargs: Any) -> None:
        """As `Accelerator.print`: rank 0 prints, each worker before the ranks are known."""
        if self._loop is None or self.session.rank == 0:
            type(self.accelerator).print(self.accelerator, *args, **kwargs)


class _Saving(NotFollowed):
    """The `save_pretrained` of a sharded model: whole weights, by rank 0; all workers call it."""

    def __init__(self, whole: Callable[[], dict[str, Any] | None], save: Callable[..., Any]) -> None:
        """`whole`: returns the whole weights, None on ranks that write nothing. `save`: the model's own method."""
        self._whole, self._save = whole, save

    def __call__(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        weights = self._whole() if state_dict is None else state_dict
        return None if weights is None else self._save(save_directory, *args, state_dict=weights, **kwargs)

    def __deepcopy__(self, _: Any) -> _Saving:
        return self


class _Refused(NotFollowed):
    """A method that a sharded model does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"{line_here()}: model.{self._name}(): each worker has a part of the model. Use "
            "trainer.save_model(folder), and merge or generate from that folder."
        )


def write_whole(trainer: Any, model: Any) -> None:
    """Let a sharded model write whole files, and refuse what needs all of it in one process."""

    def whole() -> dict[str, Any] | None:
        weights = weights_of(trainer.session.step)
        return None if weights is None else trainer._with_tied(weights)

    if hasattr(model, "save_pretrained"):
        model.save_pretrained = _Saving(whole, model.save_pretrained)
    if not isinstance(model, PreTrainedModel):  # one of PEFT: it calls modules inside, where nothing is gathered
        for name in _OF_A_WHOLE_ONE:
            if hasattr(model, name):
                setattr(model, name, _Refused(name))
