"""Shared by tests of optimizers and recipes."""

from keras import ops


def tensors(gradient):
    return [ops.convert_to_tensor(g, "float32") for g in gradient]
