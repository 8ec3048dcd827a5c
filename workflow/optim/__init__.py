"""The update of the parameters: segments with equal treatment, the optimizer graphs, and the learning rate.

Step `configure` builds the graphs; the trainer binds them to slices of the flat buffers and runs them. Nothing here
runs a graph or depends on a device.
"""
