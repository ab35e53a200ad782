"""Rewards in worker processes: whatever a reward function does costs exactly its own sample."""

import asyncio
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest

from slime_cli.addresses import is_local
from slime_cli.buffer.types import Sample, Status
from slime_cli.buffer.values import RewardFailure
from slime_cli.rewards import rewards
from slime_cli.rewards.rewards import RewardPool

FUNCTIONS = """
import asyncio, functools, math, os, sys, time
def act(word):
    if word == "hang": time.sleep(600)
    if word == "spin":
        while True: pass
    if word == "raise": raise KeyError("lost")
    if word == "exit": sys.exit(3)
    if word == "abort": os.abort()
    if word == "vanish": os._exit(7)
    if word == "print": print("noise on stdout", flush=True); os.write(1, b"more noise")
    if word == "stdin": sys.stdin.read()
    values = {"nan": math.nan, "inf": -math.inf, "none": None, "text": "1.0", "object": object(), "yes": True,
              "huge": 10**400}
    return values.get(word, 0.25)
def sync(args, sample, **kw): return act(sample.response)
async def blocking(args, sample, **kw): return act(sample.response)
async def waiting(args, sample, **kw):
    if sample.response == "hang": await asyncio.sleep(600)
    if sample.response == "own": raise TimeoutError("mine")
    await asyncio.sleep(0.3)
    return 0.25
def changing(args, sample, **kw):
    sample.metadata["seen"] = (os.getpid(), args.extra)
    sample.status = sample.status.__class__.TRUNCATED
    sample.index = 999
    return 1
def dicts(args, sample, **kw): return {"score": float(sample.response), "note": "n"}
def array(args, sample, **kw):
    import numpy
    return numpy.float32(0.5)
def torch_loaded(args, sample, **kw): return float("torch" in sys.modules)
def group(args, samples, **kw): return [float(len(samples)), float("nan")] + [1.0] * (len(samples) - 2)
def group_short(args, samples, **kw): return [1.0]
async def group_number(args, samples, **kw): return 1.0
def logged(function):
    @functools.wraps(function)
    def call(*a, **k): return function(*a, **k)
    return call
@logged
async def hidden(args, sample, **kw):
    await asyncio.sleep(0.3)
    return act(sample.response)
plain = lambda args, sample, **kw: hidden(args, sample)
@functools.wraps(hidden)
def adapter(args, sample, **kw):
    run = hidden(args, sample)
    try: run.send(None)
    except StopIteration: pass
    run.close()
    return 0.25
@logged
async def hidden_group(args, samples): return [0.25] * len(samples)
"""


def options(**changes):
    names = ("rm_type", "rm_url", "custom_rm_path", "group_rm", "reward_key")
    return types.SimpleNamespace(**{**dict.fromkeys(names), "rm_timeout": 1.0, "rm_workers": 2, **changes})


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return lambda name, **changes: options(custom_rm_path=f"{path}:{name}", **changes)


def samples_of(*responses, **fields):
    return [Sample(i, 0, response=response, **fields) for i, response in enumerate(responses)]


async def scored(samples, args, timeout=1.0, workers=2):
    async with RewardPool(workers, timeout) as pool:
        results = await asyncio.gather(*(pool.score(sample, args) for sample in samples))
        pids = pool.workers.pids()
    assert not [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()], "a worker outlived its pool"
    return results, pool


GUILTY = {
    "hang": ("timeout", "no result in 1 s"),
    "spin": ("timeout", "no result in 1 s"),
    "raise": ("error", "KeyError: 'lost' at "),
    "exit": ("error", "SystemExit: 3"),
    "abort": ("crash", "died of SIGABRT"),
    "vanish": ("crash", "exited with code 7"),
    "nan": ("bad_value", "nan"),
    "inf": ("bad_value", "-inf"),
    "huge": ("bad_value", "the reward is 1"),
    "none": ("bad_value", "NoneType None"),
    "text": ("bad_value", "str '1.0'"),
    "object": ("bad_value", "is no plain value"),
}


@pytest.mark.parametrize("function", ["sync", "blocking"])
@pytest.mark.slow
async def test_only_the_guilty_sample_fails(functions, function):
    words = ["fine", "fine", *(word for guilty in GUILTY for word in (guilty, "fine")), "print", "stdin", "yes"]
    samples = samples_of(*words)
    results, pool = await scored(samples, functions(function))
    for word, result in zip(words, results, strict=True):
        if word in GUILTY:
            kind, detail = GUILTY[word]
            assert isinstance(result, RewardFailure) and result.kind == kind and detail in result.detail, (word, result)
        else:
            assert result == (1.0 if word == "yes" else 0.25), (word, result)
    assert pool.failures == {"timeout": 2, "error": 2, "crash": 2, "bad_value": 6}
    assert pool.workers.replaced >= 4


@pytest.mark.slow
async def test_coroutines_wait_side_by_side_and_time_out_alone(functions):
    words = ["fine"] * 40 + ["hang", "own"] + ["fine"] * 20
    begin = time.perf_counter()
    results, pool = await scored(samples_of(*words), functions("waiting"), timeout=3.0)
    assert time.perf_counter() - begin < 15, "62 waits of 0.3 s ran one after another"
    failed = [(word, result) for word, result in zip(words, results, strict=True) if result != 0.25]
    assert failed[0] == ("hang", RewardFailure("timeout", "no result in 3 s"))
    assert failed[1][0] == "own" and "TimeoutError: mine" in failed[1][1].detail and failed[1][1].kind == "error"
    assert len(failed) == 2 and pool.workers.replaced == 0


@pytest.mark.parametrize(("function", "responses"), [("hidden", 40), ("plain", 3), ("adapter", 3)])
async def test_what_a_plain_wrapper_around_a_coroutine_function_returns_is_awaited(functions, function, responses):
    results, pool = await scored(samples_of(*["fine"] * responses, "raise"), functions(function), timeout=20, workers=1)
    assert results[:-1] == [0.25] * responses and pool.workers.replaced == 0
    assert function == "adapter" or "KeyError: 'lost' at " in results[-1].detail


async def test_a_hidden_coroutine_scores_a_group(functions):
    async with RewardPool(1, 5) as pool:
        assert await pool.score_group(samples_of("a", "b"), functions("hidden_group", group_rm=True)) == [0.25, 0.25]


async def test_rows_that_name_files_of_two_folders_get_the_neighbours_of_each(tmp_path):
    samples = samples_of(*["x"] * 6)
    for i, sample in enumerate(samples):
        folder = tmp_path / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        (folder / "helpers.py").write_text(f"VALUE = {float(i % 2)}\n")
        (folder / "reward.py").write_text("import helpers\ndef score(args, sample): return helpers.VALUE\n")
        sample.metadata["custom_rm_path"] = f"{folder}/reward.py:score"
    results, _ = await scored(samples, options(), workers=1, timeout=5)
    assert results == [0.0, 1.0] * 3


async def test_a_failure_names_the_users_line_though_a_library_raised(tmp_path):
    (tmp_path / "mine.py").write_text("import json\n\ndef score(args, sample):\n    return json.loads('{')\n")
    (result,), _ = await scored(samples_of("x"), options(custom_rm_path=f"{tmp_path}/mine.py:score"), timeout=5)
    assert result.detail.endswith(f" at {tmp_path}/mine.py:4") and "slime_cli" not in result.trace
    assert result.trace.startswith(
        f'Traceback (most recent call last):\n  File "{tmp_path}/mine.py", line 4, in score\n    return json.loads'
    )
    assert result.trace.splitlines()[-1].startswith("json.decoder.JSONDecodeError: ")


async def test_changes_to_the_sample_come_back(functions):
    (sample,) = samples_of("x")
    (result,), _ = await scored([sample], functions("changing", extra="here"))
    assert result == 1.0 and sample.metadata["seen"][1] == "here" and sample.metadata["seen"][0] != os.getpid()
    assert sample.status is Status.TRUNCATED and sample.index == 0


async def test_dict_rewards_need_their_key(functions):
    cases = {"score": ("0.5", None), "scores": ("0.5", "no 'scores'"), None: ("0.5", "--reward-key")}
    for key, (response, words) in cases.items():
        (result,), _ = await scored(samples_of(response), functions("dicts", reward_key=key))
        assert (result == {"score": 0.5, "note": "n"}) if words is None else words in result.detail
    (result,), _ = await scored(samples_of("inf"), functions("dicts", reward_key="score"))
    assert result.kind == "bad_value" and "'score' is inf" in result.detail


async def test_array_numbers_count_and_torch_is_not_imported(functions):
    (result,), _ = await scored(samples_of("x"), functions("array"), timeout=20)
    assert result == 0.5
    (result,), _ = await scored(samples_of("x"), functions("torch_loaded"), timeout=20)
    assert result == 0.0


async def test_groups(functions):
    samples = samples_of("a", "b", "c")
    async with RewardPool(1, 5) as pool:
        good = await pool.score_group(samples, functions("group", group_rm=True))
        assert good[0] == 3.0 and good[1].kind == "bad_value" and good[2] == 1.0
        short = await pool.score_group(samples, functions("group_short", group_rm=True))
        assert len(short) == 3 and all("returned 1 scores for 3 samples" in failure.detail for failure in short)
        number = await pool.score_group(samples, functions("group_number", group_rm=True))
        assert all("not a list" in failure.detail for failure in number)
        apart = await pool.score_group(samples, functions("sync"))
        assert apart == [0.25] * 3
        assert pool.failures == {"bad_value": 7}


async def test_metadata_wins_over_options(functions):
    exact, custom = samples_of("a", "a", label="a")
    exact.metadata = {"rm_type": "exact"}
    custom.metadata = {"custom_rm_path": functions("sync").custom_rm_path}
    results, _ = await scored([exact, custom], options(rm_type="random"), timeout=20)
    assert results == [1.0, 0.25]


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "reward"),
    [
        ("exact", "Oslo</answer>", "Oslo", 1.0),
        ("exact", "Oslo</answer>\n", "Oslo", 1.0),
        ("exact", "Oslo", "Oslo", 1.0),
        ("f1", "Oslo ###", "Oslo", 1.0),
        ("dapo", "Answer: 42###", "42", 1.0),
        ("math", r"\boxed{42}", "42", 1.0),
    ],
)
async def test_graders_of_a_whole_text_do_without_a_stop_text_that_the_user_named(rm_type, response, label, reward):
    async with RewardPool(1, 20) as pool:
        (sample,) = samples_of(response, label=label)
        found = await pool.score(
            sample, options(rm_type=rm_type, reward_key="score"), stops=("</answer>", " ###", "###", "}", "\n")
        )
    assert (found["score"] if isinstance(found, dict) else found) == reward and sample.response == response


async def test_what_cannot_be_graded_is_named(functions, tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('half written')\n")
    unlabelled, unknown, unset = samples_of("a", "b", "c")
    unlabelled.metadata = {"rm_type": "exact"}
    unknown.metadata = {"rm_type": "exakt"}
    results, _ = await scored([unlabelled, unknown, unset], options(), timeout=20)
    for result, words in zip(results, ("needs a label", "did you mean 'exact'", "no reward is set"), strict=True):
        assert result.kind == "error" and words in result.detail
    (result,), _ = await scored(samples_of("x"), options(custom_rm_path=f"{tmp_path / 'broken.py'}:f"))
    assert result.kind == "error" and "RuntimeError: half written" in result.detail
    (result,), _ = await scored(samples_of("x"), functions("sync", extra=lambda: None))
    assert result.kind == "error" and "args cannot be sent" in result.detail
    (sample,) = samples_of("x")
    sample.metadata["lock"] = threading.Lock()
    (result,), _ = await scored([sample], functions("sync"))
    assert result.kind == "error" and "pickle" in result.detail


@pytest.mark.parametrize("pause", [0.0, 0.5])
async def test_a_worker_killed_while_idle_costs_nothing(functions, pause):
    """With no pause the pool has not noticed the death when it sends the next chunk."""
    async with RewardPool(1, 10) as pool:
        assert await pool.score(*samples_of("fine"), functions("sync")) == 0.25
        os.kill(pool.workers.pids()[0], signal.SIGKILL)
        time.sleep(0.2)
        await asyncio.sleep(pause)
        results = await asyncio.gather(*(pool.score(sample, functions("sync")) for sample in samples_of(*["fine"] * 9)))
        assert results == [0.25] * 9 and pool.workers.replaced == 1


async def test_a_module_that_aborts_when_loaded_fails_its_samples_and_ends(tmp_path):
    (tmp_path / "aborts.py").write_text("import os\nos.abort()\n")
    results, _ = await scored(samples_of("a", "b"), options(custom_rm_path=f"{tmp_path / 'aborts.py'}:f"))
    assert [result.kind for result in results] == ["crash", "crash"] and "SIGABRT" in results[0].detail


@pytest.mark.slow
async def test_expressions_that_are_slow_to_compare_get_a_verdict_and_cost_no_worker():
    slow = ["9^9^9^9", r"\int_0^{\infty} e^{-x^5} \sin(x^3) \ln(x+1) dx", r"\boxed{" * 5000]
    samples = samples_of(*["1/2"] * 20, *slow, *["0.5"] * 20, label="0.5")
    results, pool = await scored(samples, options(rm_type="math"), timeout=60.0, workers=1)
    assert results == [1.0] * 20 + [0.0] * 3 + [1.0] * 20
    assert pool.workers.replaced == 0


async def test_closing_ends_waiting_samples(functions):
    pool = RewardPool(1, 60)
    waiting = [asyncio.create_task(pool.score(sample, functions("sync"))) for sample in samples_of("hang", "fine")]
    while not pool.workers.pids():
        await asyncio.sleep(0.05)
    await pool.close()
    results = await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert [result.kind for result in results] == ["error", "error"] and "closed" in results[0].detail


def test_workers_die_with_a_killed_owner(functions, tmp_path):
    script = f"""
        import asyncio, types
        from slime_cli.buffer.types import Sample
        from slime_cli.rewards.rewards import RewardPool
        async def main():
            pool = RewardPool(1, 600)
            args = types.SimpleNamespace(**{vars(functions("sync"))!r})
            task = asyncio.create_task(pool.score(Sample(0, 0, response="spin"), args))
            while not pool.workers.pids():
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)
            print(pool.workers.pids()[0], flush=True)
            await task
        asyncio.run(main())
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    worker = pathlib.Path("/proc") / owner.stdout.readline().strip()
    assert worker.exists()
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 10
    while worker.exists() and "State:\tZ" not in (worker / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.exists() or "State:\tZ" in (worker / "status").read_text()


@pytest.fixture
def remote(monkeypatch):
    """A reward service whose answers are scripted: ``replies`` is a list of (status, body), the last one repeated."""
    monkeypatch.setattr(rewards, "REMOTE_BACKOFF", 0.01)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # a proxy nobody answers at
    replies = []
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = replies.pop(0) if len(replies) > 1 else replies[0]
            if status is None:
                time.sleep(body)
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield types.SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}/rm", replies=replies, asked=asked)
    server.shutdown()
    thread.join()
    server.server_close()


async def test_remote_rewards(remote):
    args = options(rm_type="remote_rm", rm_url=remote.url)
    remote.replies[:] = [(503, "busy"), (200, "0.75")]
    (result,), _ = await scored(samples_of("r", prompt="p", label="l"), args)
    assert result == 0.75 and remote.asked == [{"prompt": "p", "response": "r", "label": "l"}] * 2
    cases = [((400, "bad"), 1, "HTTP 400: bad"), ((500, "no"), 4, "HTTP 500"), ((200, "<html>"), 1, "not JSON")]
    for reply, tries, words in [*cases, ((200, '"x"'), 1, "str 'x'")]:
        remote.replies[:], remote.asked[:] = [reply], []
        (result,), _ = await scored(samples_of("r"), args, timeout=60)
        assert words in result.detail and len(remote.asked) == tries, (reply, result)
    remote.replies[:] = [(None, 0.5)]  # on a busy machine a try ends before the server has seen it
    (result,), _ = await scored(samples_of("r"), args, timeout=0.2)
    assert result.detail.endswith("no answer in 0.2 s (4 tries)")
    (result,), _ = await scored(samples_of("r"), options(rm_type="remote_rm"))
    assert "--rm-url" in result.detail


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://localhost:1", True),
        ("http://10.1.2.3:80", True),
        ("http://[::1]:8", True),
        ("http://node7:80", True),
        ("http://8.8.8.8", False),
        ("https://api.example.com", False),
    ],
)
def test_only_public_addresses_may_go_through_a_proxy(url, local):
    assert is_local(url) == local
