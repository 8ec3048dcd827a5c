"""Transformations of ONNX graphs, one folder per purpose. Must not import kernels, sessions or a run.

`intake` splits a model into its parts: `file` reads it, `normalize` converts it to one form, `roles` decides which
tensors are trained. `objective` attaches loss and metrics, `autodiff` builds the gradient, `optimize` and `attention`
insert faster nodes, `memory` estimates memory, and `export` writes the trained model. All of them read and write
graphs with `ir`. The modules directly in this folder do not import ONNX.
"""
