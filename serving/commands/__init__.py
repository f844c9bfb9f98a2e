"""Commands of the servers, which ``deepinfer-jax`` finds by their entry points."""
