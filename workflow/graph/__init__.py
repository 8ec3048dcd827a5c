"""What is done to a model and the graphs made of it, a folder a purpose. None of it knows kernels, sessions or runs.

`intake` takes a model apart: `file` reads it, `normalize` brings it to one form, `roles` decides what is trained.
`objective` attaches loss and metrics, `autodiff` makes the gradient, `optimize` and `attention` put faster nodes in,
`memory` says what they take, `export` writes the trained model. All of them read and write graphs by `ir`. The modules
that lie here import no ONNX.
"""
