"""What is particular to a group: its action, orbits of kernels, convolution.

No attention belongs here: it is in `ops.dense`, `ops.multi_head`,
`ops.windows`, `ops.pairs` and `ops.responses`.
"""
