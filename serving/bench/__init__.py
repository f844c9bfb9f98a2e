"""Measurements of servers: what they add to the engine alone, and how states travel between them."""
