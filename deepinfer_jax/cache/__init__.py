"""A request's state between steps: its layout, and the device tree that holds it."""
