"""The thin formulas of one paper each, made of the parts of `ops`."""
