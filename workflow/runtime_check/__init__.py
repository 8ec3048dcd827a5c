"""Checks once per machine whether the installed ONNX Runtime computes correctly what ortflow's graphs need.

A table of small graphs (`images`, `places`, `products`, `recurrent`, `rows`) lists the requirements; each graph is run
as in a rank and compared with numpy in double precision. `behaviour` adds what results do not show: order, memory,
repeatability. Step `configure` calls `remember.runtime_here`; `ortflow doctor` repeats the check.
"""
