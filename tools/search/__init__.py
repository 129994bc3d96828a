"""The optimization IR: records, the log that names them, the state that follows from it, and what is made of a run."""
