"""What is particular to a group: its action, orbits of kernels, convolution.

Nothing here attends to anything.
"""
