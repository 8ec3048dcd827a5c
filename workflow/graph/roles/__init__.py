"""Which tensors are trained, and what the exporter did to them."""
