"""Steps: their shapes, their packed input, and the compiled functions that run them."""
