"""Execution over many devices: meshes, layouts as data, and the exchange between rows and spread parameters."""
