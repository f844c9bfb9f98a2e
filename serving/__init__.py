"""The processes around the engine: prefill, decode, vision and gateway servers, the KV store and its transport."""
