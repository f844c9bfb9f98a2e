"""``python -m tests.campaigns.random_load``: random requests at one engine; nothing may grow, leak or compile.

The engine serves the small trained model, bounded and with compact decoder replay, over a store of blocks and with too
few pages, so that hits, replays, preemptions and evictions happen all the time. Requests arrive at random, are aborted,
run into deadlines, come back as next turns of a conversation, and ask for everything that can be asked for.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from deepinfer_jax.cache.store import MemoryStore
from deepinfer_jax.checkpoint.default_model import default_model
from deepinfer_jax.checkpoint.reader import load_model
from deepinfer_jax.engine import Engine
from deepinfer_jax.engine_build import build_engine
from deepinfer_jax.model.params import backend_form
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.replay import Replay
from deepinfer_jax.request import Output, Request, SamplingParams
from deepinfer_jax.settings import EngineSettings
from deepinfer_jax.text.tokenizer import Tokenizer

STORE_BYTES = 8 << 20
MOST_WAITING = 24
MOST_NEW = 96
REMEMBERED = 64  # conversations that can come back
# What a run may grow by between its first fifth and its end, MiB: allocators do not give everything back.
MOST_GROWTH = 64.0
SETTINGS = EngineSettings(
    slots=8,
    blocks=44,
    block_tokens=32,
    max_context=768,
    decode_rows=(1, 8),
    prefill_tiles=(1, 4),
    replay=Replay("bounded", "compact"),
    window_checkpoints=4,
)


@dataclasses.dataclass
class Load:
    """What is asked for, drawn from one seed, and what came back."""

    random: np.random.Generator
    engine: Engine
    vocabulary: int
    running: dict[int, Request] = dataclasses.field(default_factory=dict)
    answers: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    open_branches: dict[int, int] = dataclasses.field(default_factory=dict)
    conversations: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    ended: dict[str, int] = dataclasses.field(default_factory=dict)
    tokens: int = 0

    def turn(self) -> None:
        """Some arrivals, perhaps an abort, and a step."""
        while len(self.running) < MOST_WAITING and self.random.random() < 0.5:
            request = self.draw()
            number = self.engine.submit(request)
            self.running[number], self.open_branches[number], self.answers[number] = request, request.params.n, []
        if self.running and self.random.random() < 0.02:
            self.engine.abort(int(self.random.choice(list(self.running))))
        for output in self.engine.step():
            self.take(output)

    def take(self, output: Output) -> None:
        """Remember what came, and forget what ended."""
        number = output.request_id
        self.tokens += len(output.tokens)
        if output.branch == 0:
            self.answers[number] += output.tokens
        if output.finish_reason is None:
            return
        self.ended[output.finish_reason] = self.ended.get(output.finish_reason, 0) + 1
        self.open_branches[number] -= 1
        if not self.open_branches[number]:
            request = self.running.pop(number)
            self.conversations.append((*request.prompt, *self.answers.pop(number)))
            del self.open_branches[number]
            del self.conversations[:-REMEMBERED]

    def draw(self) -> Request:
        """A new prompt, or the next turn of an earlier one."""
        random, most = self.random, SETTINGS.context(self.engine.config) - MOST_NEW
        begin: tuple[int, ...] = (0,)
        if self.conversations and random.random() < 0.6:
            begin = self.conversations[random.integers(len(self.conversations))]
        fresh = random.integers(5, self.vocabulary, random.integers(1, 200)).tolist()
        prompt = (*begin, *fresh)[-most:] if random.random() < 0.1 else (*begin, *fresh)[:most]
        params = SamplingParams(
            max_tokens=int(random.integers(0, MOST_NEW)),
            temperature=float(random.choice([0.0, 0.7, 1.2])),
            top_k=int(random.choice([0, 0, 20])),
            top_p=float(random.choice([1.0, 0.9])),
            presence_penalty=float(random.choice([0.0, 0.0, 0.5])),
            repetition_penalty=float(random.choice([1.0, 1.0, 1.2])),
            stop=("\n\n",) if random.random() < 0.2 else (),
            ignore_eos=bool(random.random() < 0.3),
            seed=int(random.integers(1 << 32)),
            n=int(random.choice([1, 1, 1, 3])),
            logprobs=int(random.integers(0, 5)) if random.random() < 0.2 else None,
            prompt_logprobs=2 if random.random() < 0.05 else None,
        )
        deadline = float(random.uniform(0.05, 5.0)) if random.random() < 0.1 else None
        return Request(prompt, params, priority=int(random.integers(2)), deadline=deadline)


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def run(minutes: float, seed: int) -> dict[str, Any]:
    """Load an engine for some minutes and let it come to rest. Returns figures."""
    numerics = Numerics.preset("f32")
    config, params = load_model(default_model(), numerics, form=backend_form)
    tokenizer = Tokenizer.from_directory(default_model())
    store = MemoryStore(STORE_BYTES)
    engine = build_engine(params, config, numerics, SETTINGS, weights_id="load", tokenizer=tokenizer, store=store)
    load = Load(np.random.default_rng(seed), engine, config.vocab_size)
    begin = told = time.monotonic()
    curve: list[tuple[float, float]] = []
    steps = 0
    while (now := time.monotonic()) - begin < 60 * minutes:
        load.turn()
        steps += 1
        if now - told > 10.0:
            told = now
            gc.collect()
            curve.append((now - begin, resident()))
            click.echo(f"{now - begin:.0f} s: {curve[-1][1]:.0f} MiB, {load.tokens} tokens, {load.ended}", err=True)
    while engine.busy:
        for output in engine.step():
            load.take(output)
    engine.flush()
    early = [size for at, size in curve if at > 60 * minutes / 5]
    metrics = engine.metrics
    figures = {
        "minutes": minutes,
        "turns": steps,
        "tokens": load.tokens,
        "ended": load.ended,
        "preemptions": metrics.value("preemptions_total", way="snapshot")
        + metrics.value("preemptions_total", way="recompute"),
        "hit_tokens": metrics.value("hit_tokens_total"),
        "stored_tokens": metrics.value("stored_tokens_total"),
        "replayed_rows": metrics.value("replayed_rows_total"),
        "recompiles": metrics.value("recompiles_total"),
        "store_failures": metrics.value("store_failures_total") + metrics.value("damaged_blocks_total"),
        "used_blocks": engine.books.used_blocks,
        "used_slots": engine.books.used_slots,
        "open_requests": len(load.running),
        "mib_after_a_fifth": early[0] if early else resident(),
        "mib_most": max(early, default=resident()),
        "mib_at_the_end": resident(),
    }
    engine.close()
    return figures


def faults(figures: dict[str, Any]) -> list[str]:
    """What must not be."""
    zero = ("recompiles", "store_failures", "used_blocks", "used_slots", "open_requests")
    found = [f"{name} is {figures[name]}" for name in zero if figures[name]]
    found += [f"{count} requests ended by {reason}" for reason, count in figures["ended"].items() if reason == "error"]
    growth = figures["mib_at_the_end"] - figures["mib_after_a_fifth"]
    if growth > MOST_GROWTH:
        found.append(f"memory grew by {growth:.0f} MiB")
    return found


@click.command()
@click.option("--minutes", type=float, default=20.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(minutes: float, seed: int) -> None:
    """Print figures as JSON; ends with status 1 if anything grew, leaked, failed or compiled."""
    figures = run(minutes, seed)
    click.echo(json.dumps(figures, indent=1))
    for fault in faults(figures):
        raise click.ClickException(fault)


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    main()
