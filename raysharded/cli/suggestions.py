"""Suggestions for mistyped commands and options, in one sentence of the error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup


def close_to(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant; None if none is similar.

    For names with dots: first a name of the same section, then one anywhere whose last part is nearly the same.
    """
    known = list(names)
    section, dot, last = name.rpartition(".")
    beside = {whole.removeprefix(section + dot): whole for whole in known if whole.rpartition(".")[0] == section}
    anywhere = {whole.rpartition(".")[2]: whole for whole in reversed(known)}
    for choices, cutoff in ((beside, 0.6), (anywhere, 0.8)):
        if found := difflib.get_close_matches(last, list(choices), n=1, cutoff=cutoff):
            return choices[found[0]]
    return None


class Suggesting(TyperGroup):
    """A group of commands that suggests the command or option that was probably meant."""

    def make_context(self, *args: Any, **extra: Any) -> Any:  # typer's own class of contexts, or click's
        with _options_suggested():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # as above
        with _options_suggested():
            return super().invoke(ctx)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]  # as above
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            meant = close_to(name, self.commands) or _below(self, name)
            ctx.fail(f"No such command {name!r}{f': did you mean {meant!r}?' if meant else '.'}")
        return super().resolve_command(ctx, args)


def _below(group: TyperGroup, name: str) -> str | None:
    """A command of one of the group's subgroups: `checkpoint ls` for `ls`."""
    names = {
        inner: f"{outer} {inner}"
        for outer, command in group.commands.items()
        for inner in getattr(command, "commands", ())
    }
    meant = close_to(name, names)
    return names[meant] if meant else None


@contextmanager
def _options_suggested() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # re-raised: typer has a copy of click's classes, or click's own
        name = getattr(error, "option_name", None)
        if type(error).__name__ == "NoSuchOption" and name:
            context = getattr(error, "ctx", None)
            options = [] if context is None else [opt for param in context.command.params for opt in param.opts]
            long = [opt for opt in options if opt.startswith("--")] + ["--help"]
            meant = close_to(name, long)
            error.message = f"No such option {name}{f': did you mean {meant}?' if meant else '.'}"  # type: ignore[attr-defined] # click's
            error.possibilities = None  # type: ignore[attr-defined] # the same
        raise
