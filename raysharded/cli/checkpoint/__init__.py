"""`raysharded checkpoint`: show a run's checkpoints, verify, keep, delete and convert them.

One module for each group of commands; `target` resolves their first argument.
"""

from __future__ import annotations

from raysharded.cli.checkpoint import convert, diff, gc, ls, pin, verify
from raysharded.cli.usage import App

app = App(help="Show checkpoints, verify, keep, delete and convert them.")
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
