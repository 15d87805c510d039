"""What is particular to a group: its action, orbits of kernels, convolution.

`multi_head` is the only attention here: all pixels attend to all pixels, with
one score for all poses. Attention over windows, group self-attention and
attention on responses are in `ops.windows`, `ops.pairs` and `ops.responses`.
"""
