"""The bit fuzzer: searches for two calls that should agree in every bit and do not."""
