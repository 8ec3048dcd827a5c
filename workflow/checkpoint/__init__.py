"""Save the training state and load it again: completely, or not at all.

A checkpoint is a folder `step-00001000` of one safetensors file a rank, a manifest and a marker. The modules:

- `store`: the location of checkpoints, and the order of operations that create and delete one;
- `manifest`: the description of a checkpoint; `tensors`: the layout of a rank's file;
- `writer`: this rank's part, written in the background; `commit`: rank 0's part;
- `verify`: checks that a checkpoint is complete; `load`: also loads it; `retain`: which ones are kept.

The command line also uses `store`, `manifest`, `tensors`, `verify` and `retain`, which must not import numpy.
"""
