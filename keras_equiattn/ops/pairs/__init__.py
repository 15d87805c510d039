"""Group self-attention: scores of pairs of group elements.

`api` has the public functions and their checks, `factors` the mathematics of
a tile, `tiles` how tensors are cut into tiles, and `neighbours` how a tile
sees the neighbours of its pixels.
"""
