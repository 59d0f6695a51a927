"""The report as one page: HTML with inline style, script and data. Nothing is loaded from elsewhere.

The page's Content-Security-Policy allows exactly that: this style and this script, by their SHA-256 (W3C, Content
Security Policy Level 3, section 2.3.1), and no requests. So even markup in a name from the journal could neither run
nor load anything; `markup.text` and `_as_json` ensure that there is none.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from string import Template
from typing import Any

from raysharded.data.ledger import LedgerReport
from raysharded.report.history.run_summary import RunSummary
from raysharded.report.page import sections, tiles
from raysharded.report.page.charts import drawn
from raysharded.report.page.markup import text


def render(summary: RunSummary, ledger: LedgerReport | None, *, url: str, damage: str, ok: bool) -> str:
    """The page of a `RunReport`, as text that can be encoded in UTF-8. Less than 2 MB for a run of any length."""
    from raysharded import __version__

    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    run = text(summary.run or "a run without a name")
    data = drawn(summary)
    page = Template(_asset("page.html")).substitute(
        policy=policy,
        title=f"{run}: raysharded report",
        style=style,
        script=script,
        data=_as_json(data),
        keys=sections.keys(summary, data),
        run=run,
        lead=sections.lead(summary, url),
        warnings=sections.warnings(summary, damage, ok=ok),
        tiles=tiles.tiles(summary, ledger),
        times=sections.times(summary),
        incidents=sections.incidents(summary.incidents),
        more=sections.more(summary),
        checkpoints=sections.checkpoints(summary.checkpoints),
        proof=sections.proof(summary, ledger),
        footer=f"Made by raysharded {text(__version__)} from the run's journal alone.",
    )
    return page.encode(errors="replace").decode()  # names may have halves of surrogate pairs


def _as_json(value: Any) -> str:  # any JSON value
    """JSON that can be placed in a script element: nothing in it ends the element or begins a comment."""
    found = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return found.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return files("raysharded.report.page").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
