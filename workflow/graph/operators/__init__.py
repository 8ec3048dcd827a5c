"""Families of operators, one module each, with all that is known of them side by side.

Gradients, how they act on divided inputs and on shares of the tokens, sizes, cost, precision and properties: each is a
decorated function or a line, which enters it in a table of `rules`. `families` imports them all.
"""
