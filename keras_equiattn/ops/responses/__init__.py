"""Attention on the responses of a convolution before they are summed.

`api` has the public functions and their checks; `spec` says what is computed,
and has the types and the names of all axes; `chunked` computes some output
channels at a time, `channels` some input channels at a time; `depthwise` is the
convolution of statistics; `reference` computes it all in a few plain lines.
`dispatch` chooses how much is computed at a time and in which form, and holds
the constants of these choices with what was measured. Attention on the input of
a convolution does not belong here, since it sees no responses: it is in
`ops.papers`.
"""
