"""The programs of the corpus in other ways: other batches, other engines, another way through the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import raysharded as rs
from raysharded.task import has_tensor_parallelism
from tests.corpus.program import Program
from tests.corpus.runs import Size

Change = Callable[[Program], Program]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Another way to train a program, and the sizes at which its bits are compared."""

    about: str
    sizes: Sequence[Size]
    """The first is what the others are compared with."""
    change: Change = lambda program: program
    as_usual: bool = False
    """True if its bits are those of the unchanged program, at 1 worker."""
    applies: Callable[[Program], bool] = lambda _: True


def _engine(**settings: object) -> Change:
    def changed(program: Program) -> Program:
        engine = dataclasses.replace(program.engine, **settings)  # type: ignore[arg-type]  # each is one of its fields
        return dataclasses.replace(program, engine=engine)

    return changed


def _batch(microbatches: int, steps: int) -> Change:
    return lambda program: dataclasses.replace(program, microbatches=microbatches, steps=steps)


ALONE, KILLED = Size(workers=1), Size(workers=3, is_killed=True)
VARIANTS: dict[str, Variant] = {
    "one microbatch": Variant(
        about="M = 1: two of three workers have none", sizes=(ALONE, KILLED), change=_batch(1, 3)
    ),
    "many microbatches": Variant(about="M = 64", sizes=(ALONE, KILLED), change=_batch(64, 2)),
    "resumed": Variant(
        about="three workers, and one goes on from the checkpoint of step 2",
        sizes=(Size(workers=3, stops_after=2, then=1),),
        as_usual=True,
    ),
    "forked": Variant(
        about="one worker, and three go on from it in a fork",
        sizes=(Size(workers=1, stops_after=2, then=3, forks=True),),
        as_usual=True,
    ),
    "parity": Variant(
        about="what is lost is computed back from a parity block",
        sizes=(KILLED,),
        change=_engine(redundancy=rs.Redundancy(parity=(2, 1))),
        as_usual=True,
    ),
    "tensor parallel": Variant(
        about="two workers compute each microbatch together",
        sizes=(Size(workers=2, tensor=2), Size(workers=4, tensor=2)),
        applies=lambda program: has_tensor_parallelism(program.task),
    ),
    "local": Variant(
        about="gradients are added before they are exchanged",
        sizes=(KILLED,),
        change=_engine(accumulation="local"),
        as_usual=True,
    ),
    "bfloat16": Variant(about="computed in bfloat16", sizes=(ALONE, KILLED), change=_engine(param_dtype="bfloat16")),
    "recomputed": Variant(
        about="activations are computed again",
        sizes=(KILLED,),
        change=_engine(activation_checkpointing=True),
        as_usual=True,
    ),
    "compiled": Variant(about="units are compiled", sizes=(ALONE, KILLED), change=_engine(compile=True)),
}
VARIED = (
    *("llama", "gpt", "mixtral", "bert", "t5", "whisper", "swin", "wav2vec2", "clip", "unet"),
    *("backbone_frozen", "adam", "combined", "lookahead", "idiom_data_assigned", "idiom_tensor_parallel"),
    *("conditional", "scalar", "experts_by_data", "table_attribute", "vae"),
)
"""The tenth of the rows that are tried in each variant, too."""
EACH_TIME = (("scalar", "resumed"),)
"""Those of them that are tried each time."""
