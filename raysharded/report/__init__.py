"""The history of a run, from its journal alone: as text, as data, and as a page.

`load(url)` returns the `RunReport`: printed with rich it shows tables, `as_dict()` is for JSON, `as_html()` is one page
that needs no other file. `load_metrics(url)` returns the numbers of its steps as an Arrow table. `loader` finds and
reads the journal, and compares the samples read with the expected ones. `history` folds the journal, `live` follows a
running run, and `page` renders the page.
"""

from raysharded.report.loader import check_ledger as check_ledger, load as load, load_metrics as load_metrics
from raysharded.report.run_report import RunReport as RunReport
