"""The thin formulas of one paper each, made of the parts of `ops`.

What several papers share does not belong here, such as windows, softmaxes and
the action of a group: that is in the rest of `ops`. Nothing here may own
weights or know a layer.
"""
