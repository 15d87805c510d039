"""What several families of networks share.

Here are the arguments that constructors check alike, the first and the last
layers, blocks of transformers, the shipped weights, and the image sizes that a
network accepts. What only one family needs belongs into its own file, and no
network is imported or registered here.
"""
