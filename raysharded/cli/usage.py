"""The class of all commands: wrong usage in one message, the library's errors in the command's words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from raysharded.cli.errors import show_error, worded
from raysharded.cli.option_names import wording_of
from raysharded.cli.suggestions import Suggesting
from raysharded.errors import RayshardedError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NEGATIVE = re.compile(r"-\d+(\.\d*)?(e[+-]?\d+)?")
_PREFIX = "Value error, "
"""Start of the message of a value that is no choice, in some versions of typer."""


class Command(TyperCommand):
    """A command that reports all its missing arguments and options at once, and library errors as one message."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer's own class of contexts, or click's
        if any(map(_NEGATIVE.fullmatch, args)):
            ctx.ignore_unknown_options = True  # `-1` is a value, which has a range
        try:
            return super().parse_args(ctx, list(args))
        except Exception as error:  # re-raised: typer has a copy of click's classes, or click's own
            if type(error).__name__ == "MissingParameter":
                ctx.fail(_missing(ctx, type(error), self._without_values(ctx, args)))
            if type(error).__name__ == "BadParameter":
                error.message = str(getattr(error, "message", "")).removeprefix(_PREFIX)  # type: ignore[attr-defined] # click's
            raise

    def invoke(self, ctx: Any) -> Any:  # as above
        with worded(wording_of(ctx)):
            try:
                return super().invoke(ctx)
            except RayshardedError as error:
                show_error(error)
                raise typer.Exit(error.exit_status if self.name == "run" else 1) from None

    def _without_values(self, ctx: Any, args: list[str]) -> list[Any]:
        """The required parameters that were not given."""
        ctx.params.clear()
        ctx.resilient_parsing = True
        super().parse_args(ctx, list(args))
        ctx.resilient_parsing = False
        return [param for param in self.params if param.required and _is_missing(ctx, param)]


class App(typer.Typer):
    """An application, or a group of its commands, with the behaviour that all commands share."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Suggesting, "no_args_is_help": True, "rich_markup_mode": None, **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        return super().command(name, cls=Command, **options)


def _is_missing(ctx: Any, param: Any) -> bool:
    source = ctx.get_parameter_source(param.name)
    wrong = ctx.params[param.name] is None and source is not None and source.name == "COMMANDLINE"
    return not wrong and ctx.params[param.name] in (None, (), [])


def _missing(ctx: Any, kind: Any, params: list[Any]) -> str:
    """One sentence from click's message about each parameter: `Missing argument 'RUN'. Choose from: ...`."""
    found = []
    for param in params:
        what, _, choices = " ".join(kind(ctx=ctx, param=param).format_message().split()).partition(". ")
        what = what.removeprefix("Missing ").rstrip(".")
        found.append(f"{what} ({choices[0].lower()}{choices[1:]})" if choices else what)
    return f"Missing {', '.join(found)}."
