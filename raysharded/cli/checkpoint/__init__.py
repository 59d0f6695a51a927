"""`raysharded checkpoint`: look at the checkpoints of a run, check them, keep some, delete others, convert them.

One module for each group of commands; `target` finds what their first argument names.
"""

from __future__ import annotations

import typer

from raysharded.cli.checkpoint import convert, diff, gc, ls, pin, verify
from raysharded.cli.suggestions import Suggesting

app = typer.Typer(
    cls=Suggesting,
    help="Look at checkpoints, check them, keep some, delete others, convert them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("ls")(ls.list_)
app.command("show")(ls.show)
app.command("verify")(verify.verify)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
app.command("fork")(pin.fork)
app.command("gc")(gc.collect)
app.command("export")(convert.export)
app.command("import")(convert.import_)
app.command("diff")(diff.diff)
