"""Stand-ins for engines: scripts that speak the line protocol, and a tiny configuration for the real one."""

import copy
import os
import sys
from pathlib import Path

from deepinfer_jax.bench import drivers
from deepinfer_jax.bench.peers import Place
from deepinfer_jax.bench.process import EngineCommand
from tests.configurations import raw_preset

REPOSITORY = Path(__file__).resolve().parent.parent
DRIVERS = Path(drivers.__file__).parent
ENVIRONMENT = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(REPOSITORY / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

# An engine whose turn is the text put in place of TURN. Its arguments: a file that its turns are written to, its name.
SCRIPT = """
import os, sys, time
sys.path.insert(0, {drivers!r})
from line_protocol import claim_output, serve
answers = claim_output()
print("a library says hello", flush=True)
def turn(batch, prompt, steps, seed):
    with open(sys.argv[1], "a") as journal:
        print(sys.argv[2], batch, prompt, steps, seed, file=journal)
    TURN
    return {{"prefill_seconds": 0.5, "decode_seconds": 2.0, "decode_tokens": batch * steps}}
serve(answers, {{"versions": {{"fake": "1.0"}}, "parameters": 7}}, turn, warm_prompt=3)
"""

# Keys that add a memory before layer 1 to a tiny configuration; the number of compressed ids is its tokenizer's.
TINY_ENGRAM = {
    "engram_layer_ids": [1],
    "engram_num_embeddings": [101 + 103],
    "engram_max_ngram_size": 2,
    "engram_vocab_size": 101,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
}


def fake_engine(directory: Path, name: str, turn: str = "pass") -> EngineCommand:
    """An engine that writes down its turns in ``directory/journal``; ``turn`` is what it does in one."""
    script = directory / f"{name}.py"
    script.write_text(SCRIPT.format(drivers=str(DRIVERS)).replace("TURN", turn), encoding="utf-8")
    return EngineCommand(
        name=name,
        numerics="f32",
        arguments=(sys.executable, str(script), str(directory / "journal"), name),
        environment=ENVIRONMENT,
        processors=2,
    )


def journal(directory: Path) -> list[list[str]]:
    """The turns of all fake engines in order: name, batch, prompt, steps and seed."""
    return [line.split() for line in (directory / "journal").read_text(encoding="utf-8").splitlines()]


def place(directory: Path) -> Place:
    """A work directory with its folder for logs."""
    (directory / "logs").mkdir()
    return Place(directory, ENVIRONMENT, own_settings={}, processors=2, max_batch=8)


def tiny_configuration() -> dict:
    """Three layers that use every mechanism of a text model but Engram: window only, ratio 2 and ratio 1."""
    raw = copy.deepcopy(raw_preset("peer-50m"))
    raw["text_config"] |= {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 1,
        "o_lora_rank": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "compress_ratios": [0, 2, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
        "index_n_heads": 2,
        "index_topk": 8,
        "max_position_embeddings": 256,
    }
    return raw


def one_layer_configuration() -> dict:
    """A single layer with compressor and indexer, which compiles fast."""
    raw = tiny_configuration()
    raw["text_config"] |= {
        "num_hidden_layers": 1,
        "compress_ratios": [1],
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0],
        "candidate_source_layer_id": None,
    }
    return raw


def tiny_drafting_configuration() -> dict:
    """The tiny configuration with Engram and a draft head of two stages that drafts three tokens."""
    raw = tiny_configuration()
    raw["text_config"] |= {
        "compress_ratios": [0, 2, 1, 0, 0],
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 3,
        "dspark_noise_token_id": 95,
        "dspark_target_layer_ids": [1, 2],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "engram_compressed_vocab_size": 96,
        **TINY_ENGRAM,
    }
    return raw
