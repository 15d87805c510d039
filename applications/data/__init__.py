"""The data: datasets by name, in batches that are reproducible.

`datasets` is what users call, and `python -m keras_equiattn.applications.data`
is its command line. Images come out of `sources` as they are on disk, `batches`
and `streams` put them together, `augmentation` changes them, and `epochs`
counts. Everything here is NumPy or `tf.data`: nothing knows a network or a
recipe, and optional packages are imported only by the functions that need them.
"""
