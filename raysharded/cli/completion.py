"""`raysharded completion`: shell completion of commands and options."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from raysharded.cli.errors import AsJson, print_json
from raysharded.cli.output import echo

PROGRAM = "raysharded"
VARIABLE = "_RAYSHARDED_COMPLETE"
"""Environment variable: if set, the command answers a shell's completion request and does nothing else."""


class Shell(Enum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    as_json: AsJson = False,
) -> None:
    """Print the script for a shell's completion of commands and options.

    bash: `eval "$(raysharded completion bash)"` in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit; fish:
    `raysharded completion fish > ~/.config/fish/completions/raysharded.fish`.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # from a private module

    script = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value)
    if as_json:
        print_json({"shell": shell.value, "script": script})
    else:
        echo(script, lines=True)


def enable() -> None:
    """Enable answers to shells, in the protocol of typer's scripts."""
    from typer.completion import completion_init  # type: ignore[attr-defined]  # from a private module

    completion_init()
