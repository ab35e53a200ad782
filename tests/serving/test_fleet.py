"""What the router and the engines of an endpoint are started with, over scripted processes."""

import contextlib
import dataclasses
import types

import pytest

from slime_cli import addresses
from slime_cli.errors import EngineError
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import resolve
from slime_cli.serving import engine, fleet


def test_the_router_s_metrics_stay_on_this_machine_and_a_user_s_own_word_comes_last(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(engine, "Server", lambda name, argv, environment, log: started.append((argv, environment)))
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")
    engine.start_router("0.0.0.0", 9000, ["--prometheus-host", "10.0.0.1"], tmp_path / "log")
    argv, environment = started[0]
    hosts = [argv[i + 1] for i, word in enumerate(argv) if word == "--prometheus-host"]
    assert hosts == ["127.0.0.1", "10.0.0.1"] and argv[argv.index("--host") + 1] == "0.0.0.0"
    assert "HTTP_PROXY" not in environment  # engines may be on any machine, and no proxy knows them


@pytest.mark.parametrize(
    ("host", "given"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::]"), ("0.0.0.0", "0.0.0.0")]
)
def test_the_router_gets_an_address_with_brackets_around_ipv6(monkeypatch, tmp_path, host, given):
    started = []
    monkeypatch.setattr(engine, "Server", lambda name, argv, environment, log: started.append(argv))
    engine.start_router(host, 9000, [], tmp_path / "log")
    engine.start_router("localhost", 9000, [], tmp_path / "log")
    hosts = [argv[argv.index("--host") + 1] for argv in started]
    assert hosts[0] == given and hosts[1] in ("127.0.0.1", "[::1]")


def test_ranks_of_an_engine_meet_without_a_server_and_copies_of_the_model_do_not_share_the_place(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    found = engine.rendezvous(("--dtype", "float32"), "/tmp/x")
    assert found == {
        "GLOO_SOCKET_IFNAME": "eth7",
        "NCCL_SOCKET_IFNAME": "lo",
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "file:///tmp/x/ranks",
    }
    assert "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" not in engine.rendezvous(("--dp-size", "2"), "/tmp/x")


class Scripted:
    """Stands in for an engine's process, or the router's."""

    def __init__(self, spec=None):
        self.spec = spec
        self.stopped = False

    def stop(self):
        self.stopped = True


@pytest.mark.parametrize(
    ("command", "colocate", "gpus", "expected"),
    [
        ("serve-rollout", False, 1, [0]),
        ("serve-rollout", False, 8, [0, 2]),
        ("train", True, 8, [0, 2]),
        ("train", False, 8, [2, 4]),
        ("train", False, 1, [0]),  # one GPU for both
        ("train", False, 4, [2, 0]),  # too few: they share the trainer's
    ],
)
def test_engines_begin_at_the_first_gpu_that_no_trainer_has(monkeypatch, command, colocate, gpus, expected):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wide = 2 if len(expected) > 1 else 1
    slime = SlimeOptions(rollout_num_gpus_per_engine=wide, actor_num_gpus_per_node=wide, colocate=colocate)
    device = fleet.hardware.Device("cuda", gpus, "a GPU")
    resolved = types.SimpleNamespace(command=command, slime=slime)
    assert [fleet.first_device(resolved, place, device) for place in range(len(expected))] == expected


@contextlib.contextmanager
def fleet_of(monkeypatch, tmp_path, **slime):
    monkeypatch.setattr(fleet, "start_router", lambda *a: Scripted())
    given = {"rollout_num_gpus": 2, "rollout_seed": 7} | slime
    resolved = dataclasses.replace(resolve([], [], "serve-rollout"), slime=SlimeOptions(**given))
    monkeypatch.setattr(fleet, "engine_argv", lambda resolved, model: [])
    made = fleet.Fleet(resolved, "model", tmp_path, Scripted, lambda text: None)
    yield made
    made.stop()
    assert all(engine.stopped for engine in made.engines)


def test_engines_listen_where_the_router_s_users_can_reach_them(monkeypatch, tmp_path):
    with fleet_of(monkeypatch, tmp_path) as made:
        assert [e.spec.host for e in made.engines] == ["127.0.0.1"] * 2 and made.router_url.startswith(
            "http://127.0.0.1:"
        )
        assert [(e.spec.first_device, e.spec.seed) for e in made.engines] == [(0, 7), (1, 8)]
    with fleet_of(monkeypatch, tmp_path, sglang_router_ip="0.0.0.0") as made:
        host = addresses.reachable("0.0.0.0")
        assert {e.spec.host for e in made.engines} == {host} and made.router_url.startswith(f"http://{host}:")


def test_engines_whose_weights_change_under_requests_tell_each_token_s_version_and_cache_no_prefix(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = f"--hf-checkpoint {tmp_path} --prompt-data p --num-rollout 1 --rollout-batch-size 2 --rm-type exact"
    for policy, there in (("pause", True), ("abort", False)):
        more = f"--schedule async --use-tis --in-flight {policy}"
        argv = engine.engine_argv(resolve(f"{words} {more}".split(), [], "train"), str(tmp_path))
        assert ("--disable-radix-cache" in argv) == ("--incremental-streaming-output" in argv) == there


def test_a_death_is_said_once_and_the_one_that_ends_the_run_is_in_its_error_alone():
    def engine(url):
        return types.SimpleNamespace(found={"url": url, "exit_code": None, "last_lines": f"last of {url}"})

    engines = [engine("http://a"), engine("http://b")]
    for one in engines:
        one.state = lambda one=one: one.found
    said = []
    watched = fleet.Fleet.__new__(fleet.Fleet)
    watched.engines, watched.dead, watched.say = engines, set(), said.append
    watched.router = types.SimpleNamespace(exit_code=lambda: None)
    watched.check()
    engines[0].found["exit_code"] = -9
    for _ in range(2):
        watched.check()
    assert said == ["engine 0 (http://a) ended with code -9; its last lines:\nlast of http://a"]
    engines[1].found["exit_code"] = 1
    with pytest.raises(EngineError, match="engine 1 .* ended with code 1"):
        watched.check()
    assert len(said) == 1
