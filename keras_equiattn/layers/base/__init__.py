"""The parts of several layers: base classes, and linear maps.

`GroupLayer` brings every input to one layout and checks it. `FilterLayer` has a
basis for its filters. `AttentionLayer` adds maps of attention that a layer can
return, and `WindowLayer` the shape of a window. `linear_maps` and
`initializers` create variables.

Nothing here is a layer that a user creates, or computes more than a linear map:
computations are in `keras_equiattn.ops`.
"""
