"""Deliberate mistakes in the code, and a run that shows that the tests notice each of them.

`python -m tests.mutants` (or `make mutants`) makes one change at a time in a copy of the repository and runs the tests
that should fail then. The changes are data, under `changes`.
"""
