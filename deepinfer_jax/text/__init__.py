"""Text in and out: token ids of a prompt or a chat, text of generated ids, and the Engram compressed vocabulary.

Import the modules themselves: :mod:`~deepinfer_jax.text.tokenizer`, :mod:`~deepinfer_jax.text.chat` (the only one that
needs the ``deepseek-recipe`` package) and :mod:`~deepinfer_jax.text.compressed_vocabulary`.
"""
