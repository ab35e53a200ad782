"""Who listens where beside genuine engines, and that nothing of the working directory is imported by anybody."""

import json
import time

import psutil

from slime_cli import addresses, manifests
from tests.end_to_end.conftest import SMALL, start


def listening(root: int) -> dict[str, str]:
    """Address -> program, of a process and all that descend from it."""
    family = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    out = {}
    for process in family:
        try:
            out |= {
                c.laddr.ip: " ".join(process.cmdline())[:120]
                for c in process.net_connections("tcp")
                if c.status == psutil.CONN_LISTEN
            }
        except psutil.NoSuchProcess:
            pass
    return out


def is_loopback(ip: str) -> bool:
    return addresses.is_loopback(ip.removeprefix("::ffff:"))


def test_an_endpoint_listens_on_loopback_alone(served):
    found = listening(manifests.read(served / "endpoint.json", manifests.Endpoint).owner_pid)
    assert found and all(is_loopback(ip) for ip in found), found


def test_a_run_among_hostile_scripts_finds_the_user_s_function_and_listens_on_loopback_alone(served, hostile, tmp_path):
    (hostile / "my_rewards.py").write_text(
        "import my_helpers\n\nasync def score(args, sample):\n    return my_helpers.VALUE\n"
    )
    (hostile / "my_helpers.py").write_text("VALUE = 0.5\n")
    run = tmp_path / "run"
    words = (
        "train",
        "--profile",
        SMALL,
        "--run-dir",
        run,
        "--rollout-endpoint",
        served / "endpoint.json",
        "--custom-rm-path",
        "my_rewards.score",
    )
    process = start(*words, log=tmp_path / "out.log", cwd=hostile)
    strangers: dict[str, str] = {}
    while process.poll() is None:
        try:
            strangers |= {ip: who for ip, who in listening(process.pid).items() if not is_loopback(ip)}
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.5)
    assert process.returncode == 0, (tmp_path / "out.log").read_text()[-3000:]
    assert not strangers
    rewards = [
        json.loads(line)["reward_mean"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if "reward_mean" in line
    ]
    assert rewards and set(rewards) == {0.5}
