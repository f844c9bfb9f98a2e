"""One stand-alone script per engine, run by that engine's own interpreter, and the line protocol that they share.

The scripts import nothing of this project: the environments they run in do not have it.
"""
