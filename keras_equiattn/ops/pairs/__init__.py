"""Group self-attention: scores of pairs of group elements.

`api` has the public functions and their checks, and `dispatch` chooses the
size of blocks and the form of products. `blocks` cuts tensors into blocks,
`fused` computes one and has the mathematics, `lines` says what its pixels see,
and `matrices` multiplies small matrices.

Attention with one score for all poses is in `ops.multi_head`.
"""
