"""The layers of attentive group convolution."""
