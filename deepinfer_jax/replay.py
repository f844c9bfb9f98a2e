"""Where a request goes on after a prefix hit: which rows are computed again, and what they may see.

Pages of the hit are held; window rings are not. Model specification, section 17.
"""

from __future__ import annotations

import dataclasses

from deepinfer_jax.cache.blocks import Replays
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError

DEFAULT_KEEP = 140


@dataclasses.dataclass(frozen=True)
class Replay:
    """How windows are rebuilt.

    Attributes:
        mode: ``exact`` computes so many rows again that nothing differs from a cold prompt; ``bounded`` one window of
            them, over which the result is approximate.
        decoder: ``off`` runs every prompt row through the decoder layers; ``compact`` only the last ``keep`` rows,
            which see windows from there on; ``mask`` computes all rows and gives the kept ones the same windows.
        keep: prompt rows that decoder layers keep, in tokens.
    """

    mode: str = "exact"
    decoder: str = "off"
    keep: int = DEFAULT_KEEP

    def check(self, config: ModelConfig, max_drafts: int) -> None:
        """Check against a model.

        Raises:
            ConfigError: an unknown mode, ``keep`` that does not cover a decoding token's windows, or a model without
                decoder layers.
        """
        if self.mode not in ("exact", "bounded"):
            raise ConfigError("replay.mode", self.mode, "exact or bounded")
        if self.decoder not in ("off", "mask", "compact"):
            raise ConfigError("replay.decoder", self.decoder, "off, mask or compact")
        if self.decoder == "off":
            return
        least = config.sliding_window + max_drafts + 1
        if self.keep < least:
            raise ConfigError("replay.keep", self.keep, f"at least window + drafts + 1, {least} tokens")
        if config.encoder_layers == config.num_hidden_layers:
            raise ConfigError("replay.decoder", self.decoder, "off for a model without decoder layers")

    def decoder_floor(self, prompt_length: int) -> int:
        """The first prompt position that runs through the decoder layers."""
        return 0 if self.decoder == "off" else max(0, prompt_length - self.keep)


@dataclasses.dataclass(frozen=True)
class Restart:
    """How a request begins.

    Attributes:
        start: first position that is computed.
        floor: lowest window position that its rows see.
        held: entries of tokens below it are in the pages and stay as they are.
        decoder_floor: lowest window position in decoder layers.
        replays: what its new blocks descend from.
    """

    start: int = 0
    floor: int = 0
    held: int = 0
    decoder_floor: int = 0
    replays: Replays = ()


def restart(
    replay: Replay, config: ModelConfig, hit: int, replays: Replays, prompt_length: int, *, windows_held: bool
) -> Restart:
    """Where to begin behind a hit of ``hit`` tokens whose blocks descend from ``replays``.

    ``windows_held``: the windows at exactly ``hit`` are held too. They serve unless a kept row lies before ``hit``: its
    decoder windows depend on where this prompt ends.
    """
    decoder_floor = replay.decoder_floor(prompt_length)
    if windows_held and (replay.decoder == "off" or decoder_floor >= hit):
        return Restart(hit, 0, hit, decoder_floor, replays)
    if replay.mode == "bounded":
        start = max(0, hit - config.sliding_window)
        if start > 0:
            replays = (*replays, hit)
    else:
        start = exact_start(replay, config, hit, prompt_length)
    return Restart(start, start, hit, max(decoder_floor, start), replays)


def exact_start(replay: Replay, config: ModelConfig, hit: int, prompt_length: int) -> int:
    """The last position from which computing without any window gives exact windows at ``hit``.

    Row t of layer l (counted from 1) is exact from ``start + l (W - 1)`` on, as it sees W - 1 rows back in each layer.
    With decoder replay only encoder layers count, but the first kept row must be exact behind all of them.
    """
    reach = config.sliding_window - 1
    if replay.decoder == "off":
        return max(0, hit - config.num_hidden_layers * reach)
    wanted = min(hit, replay.decoder_floor(prompt_length))
    return max(0, wanted - config.encoder_layers * reach)
