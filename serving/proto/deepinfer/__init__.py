"""Protobuf package ``deepinfer``."""
