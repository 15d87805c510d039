"""The layers of attentive group convolution.

Attention here weighs the input or the responses of a convolution.
Self-attention does not belong here, nor do the formulas: attention on responses
is computed in `keras_equiattn.ops.responses`, and attention on the input in
`keras_equiattn.ops.papers.input_attention`.
"""
