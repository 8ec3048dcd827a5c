"""Pipeline stages: a forward graph cut into several, and each of them made a forward and a backward graph.

`cut` assigns nodes to stages, `pieces` makes the graphs, `derivative` differentiates one, `halves` divides the result.
`balance` finds cuts, `join` puts stages together that lie in several files. Called by `ortflow.workflow.assembly`.
"""
