"""The layers of ACmix: attention and convolution from the same maps."""
