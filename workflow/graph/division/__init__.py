"""Divides the layers of a forward graph over ranks: tensor parallelism (Shoeybi et al. 2019, Megatron-LM).

`layers` finds what can be divided, by following through the graph what becomes of a weight's columns (`rules`) until
the rows of another weight sum them up. `vocabulary` divides tables of tokens and the scores over them. `rewrite` makes
the graph of one part, and `divide` is the entry.
"""
