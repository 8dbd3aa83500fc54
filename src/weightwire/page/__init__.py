"""Show: a run as pictures in a browser, live or as one file, from nothing but its bucket.

`run_reader` reads the bucket and remembers (`heat_reader`: what deltas say), `run_view` is what there is to show as
plain data (`layers`: which tensors make up a row), `document` the HTML around it, `page_server` the server. Pictures
are drawn in the browser: `charts.js`, `timeline.js` and `chain.js` make them of the data, `format.js` makes numbers and
names readable and harmless, `page.js` is the rest.
"""

from weightwire.page.export import export_page
from weightwire.page.page_server import PORT, PageServer

__all__ = ["PORT", "PageServer", "export_page"]
