"""Tables of what is known of an operator, one module a kind, and what their rules are given.

Each has a decorator or a function that enters an operator. `operators` does that, by families. Passes import
`operators.families` and look up the tables.
"""
