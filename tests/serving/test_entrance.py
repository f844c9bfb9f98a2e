"""How much may be inside a gateway at a time."""

import contextlib

import pytest

from serving.entrance import Entrance
from serving.errors import OverloadedError


def test_requests_are_counted_to_their_end_and_prompts_to_their_first_token():
    entrance = Entrance(2, 100)
    with entrance.enter(60) as first_token:
        assert (entrance.requests, entrance.prompt_tokens) == (1, 60)
        with pytest.raises(OverloadedError, match="60 prompt tokens wait") as refused, entrance.enter(41):
            pass
        assert (refused.value.reason, refused.value.retry_after) == ("QUEUE_FULL", 1.0)
        first_token()
        first_token()
        with entrance.enter(100):
            assert (entrance.requests, entrance.prompt_tokens) == (2, 100)
            with pytest.raises(OverloadedError, match="2 requests are open"), entrance.enter(0):
                pass
    assert (entrance.requests, entrance.prompt_tokens) == (0, 0)


def test_a_long_prompt_enters_alone_and_failures_leave():
    entrance = Entrance(2, 100)
    with contextlib.suppress(ValueError), entrance.enter(1000):
        assert entrance.prompt_tokens == 1000
        raise ValueError("fails")
    assert (entrance.requests, entrance.prompt_tokens) == (0, 0)
