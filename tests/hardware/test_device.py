"""What follows from the device: the type that the trainer and its engines compute in."""

import json

import pytest

from slime_cli.hardware import device, engine_kernels
from slime_cli.options.resolve import resolve
from slime_cli.serving import engine


@pytest.mark.parametrize(
    ("kind", "megatron", "dtype"),
    [
        ("cuda", {}, "bfloat16"),
        ("cuda", {"bf16": True}, "bfloat16"),
        ("cuda", {"fp16": True}, "float16"),
        ("cpu", {}, "float32"),
        ("cpu", {"bf16": True}, "bfloat16"),
        ("cpu", {"bf16": False}, "float32"),
    ],
)
def test_what_the_trainer_computes_in(kind, megatron, dtype):
    assert device.trainer_dtype(kind, megatron) == dtype


@pytest.mark.parametrize(
    ("kind", "given", "config", "dtype"),
    [
        ("cuda", {}, {"torch_dtype": "float32"}, "bfloat16"),
        ("cpu", {}, {"torch_dtype": "bfloat16"}, "float32"),
        ("cuda", {"dtype": "half"}, {}, "half"),
        ("cuda", {}, {"quantization_config": {"quant_method": "awq"}}, "auto"),
        ("cpu", {}, {"quantization_config": {"quant_method": "fp8"}}, "float32"),
    ],
)
def test_engines_are_told_to_compute_in_the_trainer_s_type_unless_the_user_or_the_weights_say_otherwise(
    monkeypatch, tmp_path, kind, given, config, dtype
):
    monkeypatch.setattr(device, "find", lambda: device.Device(kind, 1, kind))
    monkeypatch.setattr(engine_kernels, "find", lambda: engine_kernels.Kernels({}, 9))
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [word for dest, value in given.items() for word in (f"--sglang-{dest}", value)]
    argv = engine.engine_argv(resolve(words, [], "serve-rollout"), str(tmp_path))
    assert argv[argv.index("--dtype") + 1] == dtype


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_servers_take_many_requests_at_once_unless_the_user_says_otherwise(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(device, "find", lambda: device.Device(kind, 1, kind))
    monkeypatch.setattr(engine_kernels, "find", lambda: engine_kernels.Kernels({}, 9))
    (tmp_path / "config.json").write_text("{}")
    given = ["--sglang-gc-threshold", "700", "10"]
    ours, theirs = (engine.engine_argv(resolve(words, [], "serve-rollout"), str(tmp_path)) for words in ([], given))
    assert ours[ours.index("--gc-threshold") + 1] == "50000"
    assert ours[ours.index("--log-level-http") + 1] == "warning"
    at = theirs.index("--gc-threshold")
    assert theirs[at + 1 : at + 3] == ["700", "10"]


@pytest.mark.parametrize(
    ("kind", "megatron", "config", "said"),
    [
        ("cuda", {}, {"dtype": "float32"}, "stored in float32; it is trained and served in bfloat16 (--fp16"),
        (
            "cuda",
            {"fp16": True},
            {"torch_dtype": "bfloat16"},
            "stored in bfloat16; it is trained and served in float16",
        ),
        ("cuda", {}, {"dtype": "bfloat16"}, None),
        ("cuda", {}, {}, None),
        ("cuda", {}, {"dtype": "float16", "quantization_config": {}}, "in bfloat16"),
        ("cuda", {}, {"dtype": "float16", "quantization_config": {"quant_method": "awq"}}, None),
        ("cpu", {}, {"dtype": "bfloat16"}, None),
    ],
)
def test_another_type_than_the_model_s_own_is_said_on_a_gpu(monkeypatch, kind, megatron, config, said):
    monkeypatch.setattr(device, "find", lambda: device.Device(kind, 1, kind))
    words = device.dtype_words(megatron, config)
    assert words is None if said is None else said in words


@pytest.mark.parametrize(
    ("problems", "major", "defaults", "said"),
    [
        ((), 9, {}, []),
        ((engine_kernels.ATTENTION,), 9, {"attention_backend": "triton"}, ["FlashAttention 3"]),
        ((engine_kernels.ATTENTION,), 8, {}, []),  # FlashInfer is taken there
        ((engine_kernels.SAMPLING,), 9, {"sampling_backend": "pytorch"}, ["FlashInfer"]),
        (
            (engine_kernels.SAMPLING,),
            8,
            {"attention_backend": "triton", "sampling_backend": "pytorch"},
            ["FlashInfer"] * 2,
        ),
    ],
)
def test_engines_are_not_told_to_use_kernels_that_do_not_load(problems, major, defaults, said):
    found = engine_kernels.Kernels(dict.fromkeys(problems, "ImportError: libcuda.so.1"), major)
    assert found.defaults() == defaults
    words = found.words()
    assert len(words) == len(said)
    for name, line in zip(said, words, strict=True):
        assert line.startswith(f"{name}") and "libcuda.so.1" in line
    assert found.words(given=("attention_backend", "sampling_backend")) == []


def test_libraries_are_asked_by_importing_them(monkeypatch, tmp_path):
    """In a process of its own, whose torch here says that the GPU is a Hopper."""
    (tmp_path / "torch.py").write_text("class cuda:\n    get_device_capability = staticmethod(lambda: (9, 0))\n")
    for name, text in {"sgl_kernel": "raise OSError('libcuda.so.1: no such file')", "flashinfer": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "flashinfer" / "sampling.py").write_text("print('noise')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = engine_kernels.find.__wrapped__()
    assert found == engine_kernels.Kernels({engine_kernels.ATTENTION: "OSError: libcuda.so.1: no such file"}, 9)


def test_gpus_by_their_uuids_however_they_are_written(tmp_path, monkeypatch):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho GPU-1A2b\necho GPU-3c4D\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    device.gpus.cache_clear()
    try:
        assert device.gpus() == ["1a2b", "3c4d"] and device.gpu_name("1A2B") == "1a2b"
        driver.unlink()
        device.gpus.cache_clear()
        assert device.gpus() == []
    finally:
        device.gpus.cache_clear()
