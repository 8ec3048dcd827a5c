"""Saving the training state and finding it again: whole, or not at all.

A checkpoint is a folder `step-00001000` of one safetensors file a rank, a manifest and a marker. The modules:

- `store`: where checkpoints lie, and the order in which one appears and disappears;
- `manifest`: what a checkpoint says about itself; `tensors`: the layout of a rank's file;
- `writer`: this rank's part, copied at once and written in the background; `commit`: rank 0's part;
- `verify`: is a checkpoint whole; `load`: the same, and fills memory; `retain`: which ones stay.

`store`, `manifest`, `tensors`, `verify` and `retain` serve the command line too and import no numpy.
"""
