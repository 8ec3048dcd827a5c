"""Which tensors are trained, and what an exporter did to them."""
