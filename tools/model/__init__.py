"""A model of a kernel on a card that nobody measured: latency of each timed cell, with an error band. No measurement."""
