"""Attention on the responses of a convolution before they are summed.

`api` has the public functions and their checks, `chunked` computes them some
output channels at a time, and `depthwise` is the convolution of statistics.
"""
