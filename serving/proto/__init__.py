"""The protocol: definitions under ``deepinfer/v1``, and beside them the modules that :mod:`.build` makes of them."""
