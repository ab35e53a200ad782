"""Commands to a list of engines: what is asked of each, and that a dead one keeps no other from being told."""

import pytest

from slime_cli import engine_api
from slime_cli.errors import EngineError
from slime_cli.serving import control
from tests.scripted_engine import ScriptedEngine

COMMANDS = {
    "pause": (control.pause, "/pause_generation", {"mode": "in_place"}),
    "resume": (control.resume, "/continue_generation", {}),
    "abort_all": (control.abort_all, "/abort_request", {"abort_all": True}),
    "flush": (lambda urls: engine_api.each(urls, engine_api.flush), "/flush_cache?timeout=0.2", {}),
}


def engine():
    made = ScriptedEngine("model")
    made.answers |= {path: {} for _, path, _ in COMMANDS.values()}
    return made


def dead():
    made = engine()
    made.shutdown()
    made.server_close()
    return made


@pytest.mark.parametrize("name", COMMANDS)
def test_every_engine_is_asked_by_its_own_endpoint(name):
    call, path, body = COMMANDS[name]
    engines = [engine(), engine()]
    call([e.url for e in engines])
    assert [e.posted for e in engines] == [[(path, body)]] * 2


@pytest.mark.parametrize("name", COMMANDS)
def test_dead_engines_are_named_when_all_others_were_told(name):
    call, path, body = COMMANDS[name]
    lost, living, refusing = [dead(), dead()], [engine(), engine()], engine()
    del refusing.answers[path]
    with pytest.raises(EngineError) as caught:
        call([lost[0].url, living[0].url, refusing.url, lost[1].url, living[1].url])
    assert [e.posted for e in living] == [[(path, body)]] * 2
    assert all(e.url in str(caught.value) for e in (*lost, refusing))
    assert not any(e.url in str(caught.value) for e in living)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_engine_is_no_error(name):
    COMMANDS[name][0]([])


def test_another_way_to_pause_is_asked_for_by_name():
    made = engine()
    control.pause([made.url], "retract")
    assert made.posted == [("/pause_generation", {"mode": "retract"})]


def test_a_pause_is_over_only_when_the_scheduler_has_read_it():
    made = engine()
    made.answers.pop("/server_info")
    with pytest.raises(EngineError, match=f"{made.url}/server_info"):
        control.pause([made.url])
