"""`raysharded checkpoint`: look at the checkpoints of a run, check them, keep some, delete others, convert them.

One module for each group of commands; `place` finds what their first argument names.
"""

from __future__ import annotations

import typer

from raysharded.cli.checkpoint import collecting, converting, diffing, listing, pinning, verifying
from raysharded.cli.suggesting import Suggesting

app = typer.Typer(
    cls=Suggesting,
    help="Look at checkpoints, check them, keep some, delete others, convert them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("ls")(listing.list_)
app.command("show")(listing.show)
app.command("verify")(verifying.verify)
app.command("pin")(pinning.pin)
app.command("unpin")(pinning.unpin)
app.command("fork")(pinning.fork)
app.command("gc")(collecting.collect)
app.command("export")(converting.export)
app.command("import")(converting.import_)
app.command("diff")(diffing.diff)
