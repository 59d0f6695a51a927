"""Held-out data in a user's loop; and for adapters of other frameworks: whole values of the model, what was built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raysharded.actors.model.construction import construct_whole
from raysharded.actors.session.user_step import UserStep
from raysharded.actors.shards.whole_tensors import gather_tensors
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.data.access.generators import kept
from raysharded.data.loader import MicrobatchLoader
from raysharded.data.sources import held_out_loader
from raysharded.data.streams.numbered_microbatches import MicrobatchNumbers
from raysharded.errors import ConfigError, TaskError
from raysharded.protocol.job import Job
from raysharded.task import Loss

if TYPE_CHECKING:
    from torch import nn

    from raysharded.actors.step.step import Step

_MOST_READERS = 4


class HeldOut:
    """Readers of the newest few held-out datasets of a session. Thread of the function only."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: list[tuple[Any, MicrobatchLoader]] = []

    def loader(self, data: Any) -> MicrobatchLoader:
        """The loader of these data. Raises InexactError for samples that differ from one read to the next."""
        found = next((loader for known, loader in self._known if known is data), None)
        if found is None:
            found = held_out_loader(data, self._job.batch, self._job.engine)
            self._known.append((data, found))
            if len(self._known) > _MOST_READERS:
                self._known.pop(0)[1].close()
        return found

    def close(self) -> None:
        """End the threads that read ahead."""
        for _, loader in self._known:
            loader.close()
        self._known.clear()

    def evaluate(self, step: UserStep | None, data: Any, num_samples: int | None, name: str) -> dict[str, float]:
        """As `Session.evaluate`, once the loss is set."""
        call = "session.evaluate()"
        own, loader = _open(step, call), self.loader(data)
        count = loader.num_samples if num_samples is None else num_samples
        if count < 1:
            raise TaskError(f"{line_here()}: session.evaluate(num_samples={num_samples}): give 1 or more.")
        return own.behind_update(call, lambda engine_step: engine_step.evaluate(loader, count, name))


def close(session: Any) -> None:
    """End the threads that read held-out data, once the session's function has ended."""
    session._held_out.close()


def outputs_of(session: Any, data: Any, batch_size: int, compute: Callable[[Any], Any]) -> list[Any]:
    """The results of `compute(batch)` for each batch of held-out data, in the data's order, the same on every worker.

    The batches are shared among the workers, and computed in eval mode without gradients. An output is a tensor, or
    lists, tuples and dicts of tensors and None, of the same form for each batch; it comes to the host. All workers call
    it together, behind `optimizer.step()`. A batch may be computed twice.
    """
    step, loader = _open(session.step, "an evaluation"), session._held_out.loader(data)
    return step.behind_update("an evaluation", lambda own: own.predict(compute, loader, loader.num_samples, batch_size))


def shared_batches(session: Any, data: Any, batch_size: int) -> Iterator[tuple[list[int], list[Any]]]:
    """This worker's batches of held-out data, one for each round: the sizes by rank, 0 for padding, and its samples."""
    step, loader = _open(session.step, "an evaluation"), session._held_out.loader(data)
    return step.behind_update("an evaluation", lambda own: own.shared(loader, loader.num_samples, batch_size))


def gathered(step: UserStep | None, own: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of all workers, by rank, on the host. All workers call it together, behind `optimizer.step()`."""
    return _open(step, "gathering").behind_update("gathering", lambda engine_step: _gathered(engine_step, own))


def _gathered(step: Step, own: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    step.steps.meetings.meet(step.number, "evaluation")
    group = step.steps.around.groups.state
    given = {f"{group.rank}.{place}": one.detach().cpu().contiguous() for place, one in enumerate(own)}
    found = gather_tensors(given, group)
    return [[found[f"{rank}.{place}"] for place in range(len(own))] for rank in range(group.size)]


def wait_for_all(session: Any) -> None:
    """Meet all workers, if the session's step is open behind `optimizer.step()`; nothing elsewhere."""
    step, call = session.step, "waiting"
    if step is None:
        return
    try:
        step.require_update(call)
    except TaskError:  # another place, to which workers come differently often
        return
    step.behind_update(call, lambda own: own.steps.meetings.meet(own.number, "evaluation"))


def weights_of(step: UserStep | None, *, everywhere: bool = False) -> dict[str, torch.Tensor] | None:
    """Whole parameters, tied ones once, and persistent buffers by name, on the host of rank 0; None on other ranks.

    All workers call it together, behind `optimizer.step()`. `everywhere`: on all ranks.
    """
    call = "saving the model"
    return _open(step, call).behind_update(call, lambda own: own.weights(everywhere=everywhere))


def begin_step(session: Any) -> UserStep:
    """The next step, entered, for an adapter that computes it and lets it stay open. Ends the one before."""
    session.end()
    step: UserStep | None = None
    while step is None:
        step = session.next_step()
    return step.__enter__()


def gradient(
    session: Any, loss_of: Callable[[Any], Loss | torch.Tensor], begin: Callable[[], object] = lambda: None
) -> UserStep:
    """As `Session.gradient`. `begin()` is called once for each attempt at a step, ahead of its microbatches."""
    session.end()
    while True:
        step: UserStep | None = session.next_step()
        if step is not None and step.compute(loss_of, begin):
            return step


def number_of(session: Any, rule: str) -> int:
    """The run's number of a rule of `raysharded.numerics`. Behind `Session.shard`."""
    return int(session._now().engine.steps.around.place.number_of(rule))


def remark(session: Any, about: str, sentence: str) -> None:
    """Log a sentence on rank 0, and in the journal, once for each subject. Behind `Session.shard`."""
    session._now().engine.steps.around.say(about, sentence)


def copy_of(session: Any, weights: dict[str, torch.Tensor]) -> nn.Module:
    """A model of the function's `make()` with these weights, for this worker alone."""
    model = construct_whole(session._task, session.batch.seed, "copy")
    model.load_state_dict(weights, strict=False)  # tied parameters have one name
    return model


def built_by(session: Any) -> nn.Module | None:
    """The model of `session.build`; None before."""
    return None if session._built is None else session._built.model


def leave_modes_to_loop(session: Any) -> None:
    """Log no remark on parts in eval mode: the adapter's loop sets the modes of training. Call it before `shard`."""
    session._task.sets_modes = True


def num_samples_of(session: Any) -> int | None:
    """Number of samples of the run's data; None if the run has no `data`."""
    data = session._objects.run_data
    return None if data is None or isinstance(session._job.data, MicrobatchNumbers) else int(data.num_samples)


def reads_places(session: Any) -> bool:
    """True if the run's samples are the numbers 0, 1, ..., each in its place: `data=range(n)`."""
    data = session._job.data
    return isinstance(data, range) and data == range(len(data))


def refuse_numbers(call: str, data: Any) -> None:
    """Raise ConfigError if the samples of map-style data are plain numbers: a number is a place in the training data.

    `call`: the argument, for the error. Draws of a sample's transform change no generator.
    """
    with kept():
        try:
            first = data[0] if len(data) else None
        except Exception:  # noqa: BLE001 - the user's code; the run raises it when it needs the sample
            return
    if isinstance(first, int):
        raise ConfigError(
            f"{call}: its samples are numbers, as {first!r}, and a number is taken for a place in the training data. "
            'Wrap them, as {"id": n}, and let the collator take them out.'
        )


def _open(step: UserStep | None, call: str) -> UserStep:
    if step is None:
        raise TaskError(f"{line_here()}: {call} belongs into `with step:`, behind optimizer.step().")
    return step
