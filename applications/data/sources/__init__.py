"""Where images come from: one file for each format on disk.

Each source returns NumPy arrays (for folders, paths of files) as stored: images
`(n, height, width, channels)`, uint8 in 0..255 or float32 in [0, 1], and int32
labels `(n,)`. `catalogue` has the facts about all datasets, and `access` finds
the source of a name. Nothing is shuffled, split or augmented here. Only
`prepare` uses the network.
"""
