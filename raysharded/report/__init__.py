"""What happened in a run, from its journal alone: as text, as data, and as a page.

`load(url)` gives the `RunReport`: printed with rich it shows tables, `as_dict()` is for JSON, `as_html()` is one page
that needs nothing else. `load_metrics(url)` gives the numbers of its steps as an Arrow table.
`reading` finds and reads the journal, and compares what was read with what should have been; `segments` has its files,
and `page` makes the page: `page.html`, `page.css` and `page.js`, with what is there without the script (`sections`, of
`markup`) and with the data of the charts (`drawn`).
"""

from raysharded.report.load import check_ledger as check_ledger, load as load, load_metrics as load_metrics
from raysharded.report.run_report import RunReport as RunReport
