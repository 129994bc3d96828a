"""The archive of what is published: derived from what lies there, and verified without a GPU."""
