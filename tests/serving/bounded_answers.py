"""Answers behind bounded replays against whole sequences, from which the replays of their receipts are hidden."""

import numpy as np

from tests.deepinfer_jax.test_engine_bounded import TOLERANCE, log_softmax, raw_scores, worst_difference
from tests.running_engines import KEEP, Answer, tiny_model
from tests.serving.chosen_tokens import choices


def check_bounded(decoder, request, tokens, logprobs, matched, replays):
    """An answer that descends from replays: log-probabilities, and tokens where their choice is clear.

    Args:
      decoder: decoder replay.
      request: with the seed of the branch.
      tokens, logprobs: that came.
      matched: stop string or token that ended it.
      replays: hit lengths of the bounded replays.

    Returns:
      Tokens whose choice was clear, and whether the answer would not pass as one without replays.
    """
    params, prompt = request.params, request.prompt
    ends = params.stop_ids if params.ignore_eos else params.stop_ids | {tiny_model("f32")[0].eos_token_id}
    chosen = (*tokens, *((matched,) if isinstance(matched, int) else ()))
    assert not set(tokens) & ends
    if not chosen:
        return 0, False
    keep = None if decoder == "off" or params.prompt_logprobs is not None else KEEP
    scores = raw_scores((*prompt, *chosen), replays, len(prompt), keep)
    wanted, clear = choices(scores, prompt, chosen, params, ends, params.seed)
    np.testing.assert_array_equal(np.asarray(chosen)[clear], wanted[clear])
    if params.logprobs is None:
        return int(clear.sum()), False
    answer = Answer(list(tokens), list(logprobs))
    assert worst_difference(answer, log_softmax(scores)[: len(tokens)]) <= TOLERANCE, replays
    exact = raw_scores((*prompt, *chosen), (), len(prompt), keep)
    unlike = worst_difference(answer, log_softmax(exact)[: len(tokens)]) > 5 * TOLERANCE
    return int(clear.sum()), bool(unlike)
