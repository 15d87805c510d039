"""Short formulas, each from one paper, made of the parts of `ops`.

Parts that several papers share do not belong here, such as windows, softmaxes
and the action of a group: they are in the rest of `ops`. Nothing here may own
weights or know a layer.
"""
