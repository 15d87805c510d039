"""The networks: one file for each family, and `common` for what they share.

A network is a function that returns a functional `keras.Model`, and registers
its variants with `registry.register`. Networks are built from the layers of
`keras_equiattn.layers` and of Keras. They know neither data nor training:
nothing of `applications.data` and `applications.training` is imported here.
"""
