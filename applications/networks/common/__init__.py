"""The parts that several families of networks share.

Here are the arguments that constructors check alike, the first and the last
layers, blocks of transformers, the shipped weights, and the image sizes that a
network accepts. Code that only one family needs belongs in the file of the
family, and no network is imported or registered here.
"""
