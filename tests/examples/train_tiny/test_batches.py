"""Windows for training and for scoring: every token once, and the same for the same seed and step."""

import numpy as np
import pytest

from examples.train_tiny.batches import Curriculum, Windows, scoring_windows


def documents(*lengths):
    """Documents of consecutive numbers, so that a token tells where it stands."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.int32) for end, length in zip(ends, lengths, strict=True)]


def test_an_epoch_takes_every_window_once():
    windows = Windows.of(documents(300, 230), 50, seed=3)
    per_epoch = 530 // 50 - 1
    for epoch in range(3):
        taken = [windows.batch(step, 1)[0] for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        starts = sorted(int(window[0]) for window in taken)
        assert starts == list(range(starts[0], starts[0] + 50 * per_epoch, 50))
        assert all(np.array_equal(window, np.arange(window[0], window[0] + 51)) for window in taken)


def test_batches_follow_from_seed_and_step_alone():
    first, again = (Windows.of(documents(1000), 20, seed=5) for _ in range(2))
    np.testing.assert_array_equal(first.batch(7, 4), again.batch(7, 4))
    assert not np.array_equal(first.batch(7, 4), first.batch(8, 4))
    assert not np.array_equal(first.batch(7, 4), Windows.of(documents(1000), 20, seed=6).batch(7, 4))


def test_a_batch_continues_the_order_of_single_windows():
    windows = Windows.of(documents(1000), 20, seed=1)
    single = np.concatenate([windows.batch(step, 1) for step in range(6)])
    np.testing.assert_array_equal(np.concatenate([windows.batch(step, 3) for step in range(2)]), single)


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="20 tokens of text; accepted: more than a window of 20"):
        Windows.of(documents(20), 20, seed=0)


@pytest.mark.parametrize("lengths", [(2,), (9, 8, 10), (40,), (17, 25, 33, 7)])
def test_every_target_counts_once_with_half_a_window_before_it(lengths):
    scored = scoring_windows(documents(*lengths), 8, padding=-1)
    targets = scored.windows[:, 1:][scored.counted]
    starts = {0, *np.cumsum(lengths).tolist()}
    assert sorted(targets.tolist()) == [token for token in range(sum(lengths)) if token not in starts]
    for window, counted in zip(scored.windows, scored.counted, strict=True):
        # Behind a document's first window no target is counted that sees less than half a window.
        assert window[0] in starts or not counted[:4].any()


def test_short_windows_come_first_and_chats_beside_text_last():
    text, chat = Windows.of(documents(1000), 20, seed=5), Windows.of([-documents(1000)[0]], 20, seed=5)
    short = Windows.of(documents(1000), 5, seed=5)
    lessons = Curriculum(short, text, chat, long_from=2, chat_from=4)
    np.testing.assert_array_equal(lessons.batch(1, 4), short.batch(1, 16))
    np.testing.assert_array_equal(lessons.batch(2, 4), text.batch(2, 4))
    later = lessons.batch(7, 4)
    np.testing.assert_array_equal(later[:2], chat.batch(3, 2))
    np.testing.assert_array_equal(later[2:], text.batch(7, 4)[2:])
