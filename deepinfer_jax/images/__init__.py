"""Images on the host: how large an image becomes, its pixels as patches, and its span in the prompt; no jax.

Import the modules themselves: :mod:`~deepinfer_jax.images.plan`, :mod:`~deepinfer_jax.images.pixels` (the only one that
needs Pillow) and :mod:`~deepinfer_jax.images.span`. The vision tower is :mod:`deepinfer_jax.model.vision`.
"""
