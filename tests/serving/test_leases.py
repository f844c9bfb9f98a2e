"""The table of held states against a model of it: nothing leaks, nothing is served behind its end."""

import dataclasses

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer_jax.errors import ConfigError
from serving.errors import OverloadedError
from serving.leases import Leases

SECONDS = 45.0


@dataclasses.dataclass(eq=False)
class State:
    """Something held, which notes how it ended."""

    tokens: int = 0
    size: int = 0
    expires: float | None = None
    ends: list[str] = dataclasses.field(default_factory=list)

    def end(self, reason):
        self.ends.append(reason)


class Table(RuleBasedStateMachine):
    """States come, are computed, pulled, released and dropped while time passes; ids are good, old and invented."""

    @initialize(most_bytes=st.integers(100, 1000), most_states=st.integers(1, 5))
    def begin(self, most_bytes, most_states):
        self.now = 1000.0
        self.leases = Leases(seconds=SECONDS, most_bytes=most_bytes, most_states=most_states, clock=lambda: self.now)
        self.states: dict[str, State] = {}
        self.unknown = 0

    def held(self):
        """States that must be found now."""
        return {
            kv_id: state
            for kv_id, state in self.states.items()
            if not state.ends and (state.expires is None or self.now < state.expires)
        }

    def anyone(self, data):
        return data.draw(st.sampled_from([*self.states, "0" * 32, ""]))

    @rule(tokens=st.integers(1, 99), size=st.integers(1, 400))
    def open(self, tokens, size):
        state, held = State(tokens, size), self.held()
        room = len(held) < self.leases.most_states
        room = room and sum(one.size for one in held.values()) + size <= self.leases.most_bytes
        if not room:
            with pytest.raises(OverloadedError) as refused:
                self.leases.open(lambda: state, tokens=tokens, size=size)
            assert (refused.value.reason, refused.value.retry_after) == ("KV_POOL_EXHAUSTED", 1.0)
            return
        kv_id = self.leases.open(lambda: state, tokens=tokens, size=size)
        assert kv_id not in self.states
        self.states[kv_id] = state

    @rule(data=st.data(), share=st.floats(0.1, 1.0))
    def complete(self, data, share):
        kv_id = self.anyone(data)
        state = self.held().get(kv_id)
        size = 7 if state is None else max(1, int(state.size * share))
        assert self.leases.complete(kv_id, size) == (None if state is None else SECONDS)
        if state is not None:
            state.size, state.expires = size, self.now + SECONDS

    @rule(data=st.data())
    def find(self, data):
        kv_id, renewed = self.anyone(data), data.draw(st.booleans())
        state = self.held().get(kv_id)
        if renewed:
            assert self.leases.renew(kv_id) == (state is not None)
        else:
            assert self.leases.find(kv_id) is state
            self.unknown += state is None
        if state is not None and state.expires is not None:
            state.expires = self.now + SECONDS

    @rule(data=st.data())
    def release(self, data):
        kv_id = self.anyone(data)
        state = self.held().get(kv_id)
        assert self.leases.release(kv_id) == (state is not None)
        self.unknown += state is None
        if state is not None:
            assert state.ends == ["released"]

    @rule(data=st.data())
    def drop(self, data):
        kv_id = self.anyone(data)
        state = self.held().get(kv_id)
        self.leases.drop(kv_id, "lost")
        if state is not None:
            assert state.ends == ["lost"]

    @rule(seconds=st.sampled_from([0.5, 20.0, 44.9, 45.0, 90.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def sweep(self):
        held = self.held()
        due = [state.expires - self.now for state in held.values() if state.expires is not None]
        left = self.leases.sweep()
        assert left == (pytest.approx(min(due)) if due else None)
        assert (len(self.leases), self.leases.bytes, self.leases.tokens) == (
            len(held),
            sum(state.size for state in held.values()),
            sum(state.tokens for state in held.values()),
        )
        for kv_id, state in self.states.items():
            assert bool(state.ends) != (kv_id in held)

    @precondition(lambda self: len(self.states) > 3)
    @rule()
    def drop_all(self):
        self.leases.drop_all("shut down")
        assert (len(self.leases), self.leases.bytes, self.leases.tokens) == (0, 0, 0)
        assert all(state.ends for state in self.states.values())

    @invariant()
    def every_state_ends_once_and_every_end_is_counted(self):
        if not hasattr(self, "leases"):
            return
        assert all(len(state.ends) <= 1 for state in self.states.values())
        counts = self.leases.counts
        assert counts.unknown == self.unknown
        assert counts.opened == len(self.states)
        ended = sum(bool(state.ends) for state in self.states.values())
        assert counts.released + counts.expired + counts.dropped == ended
        assert counts.opened - ended == len(self.leases)


def test_the_table_keeps_its_promises():
    run_state_machine_as_test(
        Table, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, phases=[Phase.generate])
    )


def test_a_state_that_cannot_be_made_takes_no_room():
    leases = Leases(most_bytes=10, most_states=1)

    def fail():
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        leases.open(fail, tokens=1, size=10)
    assert (len(leases), leases.bytes, leases.counts.opened) == (0, 0, 0)
    leases.open(State, tokens=1, size=10)


@pytest.mark.parametrize("changes", [{"seconds": 0.0}, {"most_bytes": 0}, {"most_states": -1}])
def test_tables_that_hold_nothing_are_refused(changes):
    with pytest.raises(ConfigError):
        Leases(**({"most_bytes": 1, "most_states": 1} | changes))
