"""Engines' memory by part, on scripted engines: what they are asked, in which order, and what is refused before."""

import pytest

from slime_cli.errors import EngineError
from slime_cli.serving.occupation import ALL, CACHE, GRAPHS, WEIGHTS, Occupation
from tests.scripted_engine import ScriptedEngine

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@pytest.fixture
def engines(tmp_path):
    made = [ScriptedEngine(tmp_path) for _ in range(2)]
    for engine in made:
        engine.answers |= {"/flush_cache?timeout=0.2": {}, RELEASE: {}, RESUME: {}}
    yield made
    for engine in made:
        engine.shutdown()
        engine.server_close()


def test_every_engine_is_empty_before_it_gives_its_memory_back_and_has_weights_before_a_cache(engines):
    occupation = Occupation(lambda: [engine.url for engine in engines])
    occupation.release(ALL)
    assert occupation.away == {*ALL}
    occupation.resume([WEIGHTS])
    occupation.resume([CACHE, GRAPHS])
    assert not occupation.away
    for engine in engines:
        assert engine.posted == [
            ("/flush_cache?timeout=0.2", {}),
            (RELEASE, {"tags": sorted(ALL)}),
            (RESUME, {"tags": [WEIGHTS]}),
            (RESUME, {"tags": sorted([CACHE, GRAPHS])}),
        ]


def test_a_wrong_order_is_refused_before_an_engine_hears_of_it(engines):
    occupation = Occupation(lambda: [engine.url for engine in engines])
    with pytest.raises(RuntimeError, match="engines are to take weights again, which they have"):
        occupation.resume([WEIGHTS])
    occupation.release(ALL)
    before = [list(engine.posted) for engine in engines]
    for tags in ([CACHE], [WEIGHTS, CACHE]):
        with pytest.raises(RuntimeError, match="weights again before anything else"):
            occupation.resume(tags)
    with pytest.raises(RuntimeError, match="are to give back weights, which they have given back"):
        occupation.release([WEIGHTS])
    assert [engine.posted for engine in engines] == before


def test_an_engine_with_requests_in_it_is_not_asked(engines):
    del engines[1].answers["/flush_cache?timeout=0.2"]
    occupation = Occupation(lambda: [engine.url for engine in engines])
    with pytest.raises(EngineError, match="its prefix cache cannot be flushed"):
        occupation.release(ALL)
    assert not occupation.away and all(path != RELEASE for engine in engines for path, _ in engine.posted)
