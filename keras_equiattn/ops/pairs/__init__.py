"""Group self-attention: scores of pairs of group elements.

`api` has the public functions and their checks, and `dispatch` chooses how
they are computed. For compilers: `blocks` cuts tensors into blocks, `fused`
computes one, and `lines` says what its pixels see. Without a compiler: `tiles`
cuts them into tiles, `factors` computes one and has the mathematics, and
`neighbours` says what its pixels see.
"""
