"""Attention over windows of neighbours.

`form` says what is computed, `api` has the public functions and their checks,
and the other modules are the ways to compute it. No paper's formula stands
here: `ops.papers` has those.
"""
