"""One process at a time updates an endpoint's weights; the next is told who does."""

import os
import signal
import subprocess
import sys

import pytest

from slime_cli import manifests
from slime_cli.errors import UsageError
from slime_cli.manifests import layout
from slime_cli.serving import claim
from slime_cli.serving.attached import Attached
from tests.scripted_engine import ScriptedEngine


def test_a_second_is_refused_by_the_first_one_s_name_until_that_has_ended(tmp_path):
    said = []
    path = claim.beside(tmp_path / "endpoint.json")
    first = claim.Claim(path, "slime train --run-dir /runs/a", said.append)
    with pytest.raises(UsageError) as raised:
        claim.Claim(path, "slime train --run-dir /runs/b", said.append)
    message = raised.value.message
    assert (
        "/runs/a" in message
        and f"pid {os.getpid()} on {os.uname().nodename}, since 20" in message
        and "serve-rollout" in raised.value.fix
    )
    assert claim.holder_of(path).holder.endswith("/runs/a")
    first.close()
    first.close()
    assert claim.holder_of(path) is None
    claim.Claim(path, "slime sync", said.append).close()
    assert not said


def test_who_was_killed_with_9_is_taken_over_and_named(tmp_path):
    path = claim.beside(tmp_path / "endpoint.json")
    code = f"""
import pathlib, time
from slime_cli.manifests import layout
from slime_cli.serving import claim
held = claim.Claim(pathlib.Path({str(path)!r}), "slime train --run-dir /runs/killed", print)
print("held", flush=True)
time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match="/runs/killed"):
        claim.Claim(path, "b", print)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    said = []
    taken = claim.Claim(path, "b", said.append)
    assert (
        len(said) == 1
        and "/runs/killed" in said[0]
        and f"pid {holder.pid}" in said[0]
        and "ended without releasing" in said[0]
    )
    assert claim.holder_of(path).holder == "b"
    taken.close()


def test_a_copy_of_the_manifest_leads_to_the_same_lock(tmp_path):
    engine = ScriptedEngine(tmp_path)
    original = tmp_path / "serve" / "endpoint.json"
    copy = tmp_path / "elsewhere" / "endpoint.json"
    manifests.write(original, engine.endpoint())  # as an older slime wrote it
    attached = Attached(str(original))
    manifests.write(copy, attached.endpoint)
    held = attached.claim("first", print)
    with pytest.raises(UsageError, match="first"):
        Attached(str(copy)).claim("second", print)
    held.close()
    Attached(str(copy)).claim("second", print).close()
    assert [p.name for p in copy.parent.iterdir()] == ["endpoint.json"]


def test_a_lock_that_is_on_another_machine_is_said_and_those_of_this_one_still_exclude_each_other(tmp_path):
    manifests.write(
        tmp_path / "endpoint.json", ScriptedEngine(tmp_path).endpoint(claim="/of/another/machine/endpoint.claim.json")
    )
    said = []
    held = Attached(str(tmp_path / "endpoint.json")).claim("first", said.append)
    assert len(said) == 1 and "/of/another/machine" in said[0] and "not on this machine" in said[0]
    with pytest.raises(UsageError, match="first"):
        Attached(str(tmp_path / "endpoint.json")).claim("second", said.append)
    held.close()


def test_a_file_that_cannot_be_opened_is_refused_in_words(tmp_path):
    (tmp_path / layout.CLAIM).mkdir()
    with pytest.raises(UsageError, match=r"cannot be opened to claim the endpoint's weights \(Is a directory\)"):
        claim.Claim(tmp_path / layout.CLAIM, "a", print)


def test_a_disk_without_locks_is_warned_about(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(claim.fcntl, "flock", refuse)
    said = []
    first = claim.Claim(tmp_path / layout.CLAIM, "a", said.append)
    assert len(said) == 1 and "carries no locks (No locks available)" in said[0]
    claim.Claim(tmp_path / layout.CLAIM, "b", said.append).close()
    assert len(said) == 2 and said[0] == said[1], "the first is alive: nothing was taken over from it"
    first.close()
