"""Inference for DeepSeek-V4.1-Flash and models of its architecture, as a JAX library of pure functions."""

__version__ = "0.1.0"
