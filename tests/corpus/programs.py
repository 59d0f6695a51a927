"""The program of each row."""

from __future__ import annotations

from tests.corpus import (
    builds,
    idioms,
    language_models,
    losses,
    model_cases,
    optimizers,
    perception_models,
    randomness,
    torch_models,
)
from tests.corpus.program import Program, Programs

_OF_TRANSFORMERS = (language_models.PROGRAMS, perception_models.PROGRAMS)
_OWN = (torch_models, optimizers, idioms, model_cases, randomness, builds, losses)
PROGRAMS: Programs = {
    name: make
    for programs in (*_OF_TRANSFORMERS, *(module.PROGRAMS for module in _OWN))
    for name, make in programs.items()
}
NEED_TRANSFORMERS = frozenset(
    {
        *(name for programs in _OF_TRANSFORMERS for name in programs),
        "backbone_pretrained",
        "idiom_resized_embeddings",
        "packed",
    }
)
"""The rows whose workers import transformers."""


def program_of(name: str) -> Program:
    """The program of a row."""
    return PROGRAMS[name]()
