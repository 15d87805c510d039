"""The parts of several layers: base classes, and linear maps.

`GroupLayer` brings every input to one layout and checks it, `AttentionLayer`
adds maps of attention that a layer can return, `linear_maps` and `initializers`
create variables.

Nothing here is a layer that a user creates, knows a family of layers, or
computes more than a linear map: computations are in `keras_equiattn.ops`.
"""
