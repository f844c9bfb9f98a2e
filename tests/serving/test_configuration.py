"""The configuration of servers: defaults, files, overrides, and what is refused."""

import re
import tomllib

import pytest

from deepinfer_jax.errors import ConfigError
from serving.configuration import Configuration, load_configuration, merged, parse_override
from serving.tables import read_table


def test_defaults_serve_the_small_model_alone_and_bounded() -> None:
    configuration = load_configuration(None, {})
    assert configuration == Configuration()
    assert (configuration.server.role, configuration.engine.replay.mode) == ("all", "bounded")


def test_the_printed_configuration_is_the_configuration() -> None:
    configuration = load_configuration(
        None, {"server": {"role": "gateway"}, "gateway": {"workers": ["unix:a", "[::1]:8"]}, "engine": {"blocks": 9}}
    )
    printed = configuration.toml()
    assert read_table(Configuration(), tomllib.loads(printed)) == configuration
    assert "# requests that may be open at a time; more are refused.\nmax_requests = 1024\n" in printed


def test_the_printed_configuration_says_what_an_absent_key_means_in_words_of_its_file() -> None:
    lines = Configuration().toml().splitlines()
    comments = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
    assert not {"None", "True", "False"} & set(re.findall(r"\w+", comments))
    absent = [line for line in lines if re.fullmatch(r"# \w+ =", line)]
    assert comments.count("absent: ") == len(absent) == 5


def test_a_file_is_read_and_overrides_win(tmp_path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("[engine]\nslots = 4\nmemory = 1000000\n[engine.replay]\nmode = 'exact'\n", encoding="utf-8")
    configuration = load_configuration(path, merged(parse_override("engine.slots=2"), parse_override("model.name=a b")))
    engine = configuration.engine
    assert (engine.slots, engine.memory, engine.replay.mode) == (2, 1_000_000, "exact")
    assert configuration.model.name == "a b"


def test_the_transfer_engine_is_used_where_it_is_asked_for_and_the_file_says_what_it_needs() -> None:
    assert Configuration().kv.transports == ("shm", "grpc")
    configuration = load_configuration(None, {"kv": {"transports": ["shm", "jax", "grpc"]}})
    printed = configuration.toml()
    assert configuration.kv.transports == ("shm", "jax", "grpc")
    assert "jax needs a network where" in printed.replace("\n# ", " ")
    assert 'transports = ["shm", "jax", "grpc"]' in printed


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"engin": {}}, "did you mean 'engine'?"),
        ({"engine": {"slots": 0}}, "'engine.slots' is 0; accepted: 1 or more"),
        ({"engine": {"encoder_only": True}}, "'engine.encoder_only' is True"),
        ({"model": {"numerics": "fp8"}}, "'model.numerics' is 'fp8'; accepted: one of f32, f32q, bf16, released"),
        ({"server": {"role": "router"}}, "'server.role' is 'router'; accepted: one of all, prefill, decode, gateway"),
        ({"server": {"listen": "0.0.0.0:1"}}, "give --allow-plaintext"),
        ({"server": {"listen": "[::]:1"}}, "give --allow-plaintext"),
        ({"server": {"listen": "localhost:65536"}}, "accepted: HOST:PORT"),
        ({"server": {"listen": "unix:"}}, "unix:PATH"),
        ({"server": {"drain_seconds": -1}}, "'server.drain_seconds' is -1.0; accepted: 0 or more"),
        ({"server": {"advertise": "somewhere"}}, "'server.advertise' is 'somewhere'"),
        ({"server": {"role": "gateway"}}, "'gateway.workers' is []; accepted: at least one worker"),
        ({"gateway": {"workers": ["a:1"]}}, "use role gateway"),
        ({"gateway": {"workers": ["a"]}}, "'gateway.workers[0]' is 'a'"),
        ({"gateway": {"workers": ["dns:a"]}}, "'gateway.workers[0]' is 'a'"),
        ({"gateway": {"prefill": "half"}}, "'gateway.prefill' is 'half'; accepted: one of full, encoder_only, none"),
        ({"gateway": {"prefill": "encoder_only"}}, "full unless engine.replay.decoder is compact"),
        ({"gateway": {"attempts": 0}}, "'gateway.attempts' is 0; accepted: above 0"),
        ({"gateway": {"deadline_margin": -0.1}}, "'gateway.deadline_margin' is -0.1"),
        ({"kv": {"chunk_bytes": 1}}, "65,536 to 2,097,152"),
        ({"kv": {"transports": []}}, "a list that has grpc"),
        (
            {"server": {"role": "prefill", "listen": "0.0.0.0:1", "allow_plaintext": True}},
            "'server.advertise' is ''; accepted: HOST:PORT at which decode workers reach this one",
        ),
        ({"kv": {"transports": ["grpc", "tcp"]}}, "'kv.transports[1]' is 'tcp'"),
        ({"metrics": {"listen": "0.0.0.0:1"}}, "'metrics.listen' is '0.0.0.0:1'"),
        ({"logging": {"level": "loud"}}, "'logging.level' is 'loud'"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(tables, sentence) -> None:
    with pytest.raises(ConfigError) as refused:
        load_configuration(None, tables)
    assert sentence in str(refused.value)


def test_plaintext_to_other_machines_must_be_said() -> None:
    tables = {"server": {"listen": "0.0.0.0:1", "allow_plaintext": True}, "metrics": {"listen": "0.0.0.0:2"}}
    assert load_configuration(None, tables).server.listen == "0.0.0.0:1"
    for address in ("127.0.0.3:1", "[::1]:1", "localhost:0", "unix:socket"):
        assert load_configuration(None, {"server": {"listen": address}}).server.listen == address


@pytest.mark.parametrize("text", ["engine.slots", "=3", "engine slots=3"])
def test_overrides_need_a_key_and_a_value(text) -> None:
    with pytest.raises(ConfigError):
        parse_override(text)


def test_a_file_that_is_no_toml_is_refused(tmp_path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("[engine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="a TOML file"):
        load_configuration(path, {})
