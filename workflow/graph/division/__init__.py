"""Divides the layers of a forward graph over ranks: tensor parallelism (Shoeybi et al. 2019, Megatron-LM).

`divisible_layers` finds what can be divided: it follows a weight's columns through the graph until the rows of another
weight sum them. How an operator acts on divided values, and on shares of the tokens, is in `operators`.
`vocabulary` divides token embeddings and the scores over the vocabulary. `rewrite` makes the graph of one part, and
`divide` is the entry point.
"""
