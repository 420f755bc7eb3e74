"""Reports for people who were not there: one self-contained HTML file with its evidence drawn, or the numbers alone.

In: answers of the server's API. Out: text or a file's bytes; nothing here asks the server except ``incident.gather``.
HTML needs the extra ``reports`` (Jinja2, matplotlib), numbers need what the server has.
"""
