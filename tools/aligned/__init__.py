"""A model whose whole forward pass agrees bit for bit: operators, transformers models patched with them, cache, tracer."""
