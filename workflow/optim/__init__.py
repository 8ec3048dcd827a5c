"""The update of the parameters: which slices go alike, the graphs that do it, and the learning rate.

`configure` makes the graphs, the trainer binds them to slices of the flat buffers and runs them. Nothing
here runs anything or knows a device.
"""
