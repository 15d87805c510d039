"""Base classes of the layers: data formats, exactness, maps, linear maps."""
