"""Divides the layers of a forward graph over ranks: tensor parallelism (Shoeybi et al. 2019, Megatron-LM).

`divisible_layers` finds what can be divided: it follows a weight's columns through the graph (`rules`) until the rows
of another weight sum them. Each family of operators has a module that registers its rules, those for shares of the
tokens included: `elementwise`, `gathered`, `normalised`, `products`, `reduced`, `shaped`, `sliced`.
`vocabulary` divides token embeddings and the scores over the vocabulary. `rewrite` makes the graph of one part, and
`divide` is the entry point.
"""
