"""`raysharded completion`: what makes a shell complete commands and options."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from raysharded.cli.errors import AsJson, print_json

PROGRAM = "raysharded"
VARIABLE = "_RAYSHARDED_COMPLETE"
"""With it in the environment the command answers a shell instead of doing something."""


class Shell(Enum):
    """Those whose scripts are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="Which shell it is for.")],
    as_json: AsJson = False,
) -> None:
    """Print the script that makes a shell complete commands and options.

    bash: `eval "$(raysharded completion bash)"` in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit; fish:
    `raysharded completion fish > ~/.config/fish/completions/raysharded.fish`.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # from a private module

    script = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value)
    if as_json:
        print_json({"shell": shell.value, "script": script})
    else:
        typer.echo(script)


def enable() -> None:
    """Let the command answer shells as typer's scripts ask."""
    from typer.completion import completion_init  # type: ignore[attr-defined]  # from a private module

    completion_init()
