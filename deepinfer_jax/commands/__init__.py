"""The subcommands of ``deepinfer-jax``, one module each with a click command named ``command``, and what they share."""
