"""The layers of ACmix: attention and convolution from the same maps.

`convolution_path` has their path of convolution, and `two_paths` adds it to the
path of attention. The formulas are not here but in
`keras_equiattn.ops.papers.acmix` and `patchwise`, and the networks of the paper
are in `keras_equiattn.applications`.
"""
