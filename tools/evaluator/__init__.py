"""The evaluator: judge, workers, checks, baselines, timing and the report."""
