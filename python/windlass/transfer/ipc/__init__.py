"""Colocated transfer: engines read the trainer's memory, in place or from packed buckets."""
