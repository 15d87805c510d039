"""Group self-attention: scores of pairs of group elements.

`api` has the public functions and their checks, and `dispatch` chooses the
size of blocks. `blocks` cuts tensors into blocks, `fused` computes one and has
the mathematics, and `lines` says what its pixels see.
"""
