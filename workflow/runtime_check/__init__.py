"""Whether the installed ONNX Runtime computes what ortflow's graphs need of it, found out once for each machine.

A table of small graphs (`images`, `places`, `products`, `recurrent`, `rows`) says what is needed; each is run as a rank
would run it and compared with numpy in double precision. `behaviour` adds what is not in a result: order, memory,
sameness. Step `configure` asks `remember.runtime_here`, and `ortflow doctor` has the check made anew.
"""
