"""The layers of ACmix: attention and convolution from the same maps.

They are made of one path of convolution, `convolution_path`, and of what joins
two paths, `two_paths`. The formulas are not here but in
`keras_equiattn.ops.papers.acmix` and `patchwise`, and the networks of the paper
are in `keras_equiattn.applications`.
"""
