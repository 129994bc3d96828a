"""Figures from recorded evidence: `tools/plot.py` draws them."""
