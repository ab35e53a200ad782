"""``make bench``: the budgets of the design that exist so far, each a figure or a ratio within one run.

Rows that fall short are written like the others. :mod:`bench.__main__` runs them and writes ``runs/bench.json``.
"""
