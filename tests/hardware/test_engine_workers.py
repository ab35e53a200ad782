"""The processes of an engine on a CPU are forked from its server, which has imported SGLang.

1. SGLang's own function chooses to spawn them, and is wrapped where an engine applies its hooks: one thread, one copy
   of the model and one tokenizer are forked.
2. Copies of the model, several tokenizers, and a server that has started a thread are left to spawn as they were.
3. At that moment a server that has imported SGLang has one thread.
"""

import json

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found():
    """What a process with the CPU engine's environment finds."""
    from tests import cpu_engine

    return cpu_engine.found(__file__)


def test_a_server_s_processes_are_forked(found):
    assert found["plain"] == "fork"


@pytest.mark.parametrize("special", ["dp_size", "tokenizer_worker_num", "thread"])
def test_what_starts_threads_is_spawned(found, special):
    assert found[special] == "spawn"


def test_sglang_alone_has_one_thread(found):
    assert found["threads"] == 1


def main() -> None:
    import multiprocessing
    import pathlib
    import tempfile
    import threading

    import sgl_kernel  # noqa: F401  (which registers the hooks)
    from sglang.srt.entrypoints import engine, http_server  # noqa: F401  (what a server imports)
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs

    from slime_cli.hardware.cpu import engine_workers
    from slime_cli.models import tiny

    HookRegistry.apply_hooks()
    config = tiny.config("tiny:qwen3") | {"model_type": "qwen3"}
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        args = ServerArgs(model_path=folder, device="cpu", attention_backend="torch_native")

    def chosen(**options: int) -> str:
        for name, value in options.items():
            setattr(args, name, value)
        engine._set_envs_and_config(args)
        for name in options:
            setattr(args, name, 1)
        return multiprocessing.get_start_method()

    out: dict[str, object] = {"threads": engine_workers.threads(), "plain": chosen()}
    out |= {name: chosen(**{name: 2}) for name in ("dp_size", "tokenizer_worker_num")}
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    out["thread"] = chosen()
    ended.set()
    thread.join()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
