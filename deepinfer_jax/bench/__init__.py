"""Measurements: what the compiler says of released-size programs, and how fast programs run."""
