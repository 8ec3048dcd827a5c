"""Pipeline stages: cuts a forward graph, and makes a forward and a backward graph of each stage.

`cut` assigns nodes to stages, `pieces` makes the graphs, `derivative` differentiates one, `halves` divides the result.
`balance` finds cuts, `join` joins stages that are in several files. Called by `ortflow.workflow.assembly`.
"""
