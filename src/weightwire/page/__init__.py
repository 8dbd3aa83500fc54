"""Show: a run as charts in a browser, live or as one file, read from its bucket alone.

`run_reader` reads the bucket incrementally, and `heat_reader` the headers of deltas. `run_view` turns their records
into a snapshot of plain data, and `layers` groups tensors into rows. `document` is the HTML, `page_server` the server.
In the browser, `charts.js`, `timeline.js` and `chain.js` make charts of a snapshot, `replicas.js` describes replicas in
words, `format.js` formats numbers and escapes names, and `page.js` does everything else.
"""

from weightwire.page.export import export_page
from weightwire.page.page_server import PORT, PageServer

__all__ = ["PORT", "PageServer", "export_page"]
