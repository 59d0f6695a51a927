"""The history of a run, from its journal alone: as text, as data, and as a page.

`load(url)` gives the `RunReport`: printed with rich it shows tables, `as_dict()` is for JSON, `as_html()` is one page
that needs nothing else. `load_metrics(url)` gives the numbers of its steps as an Arrow table.
`loader` finds and reads the journal, and compares what was read with what should have been; `history` folds it; `live`
follows a run that goes on, and `page` makes the page.
"""

from raysharded.report.loader import check_ledger as check_ledger, load as load, load_metrics as load_metrics
from raysharded.report.run_report import RunReport as RunReport
