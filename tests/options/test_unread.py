"""Megatron's options that nothing reads are refused; and of most of them no part of Megatron that slime runs has the
name."""

import ast
import importlib.util
import pathlib
import re

import pytest

from slime_cli.errors import UsageError
from slime_cli.options import own
from slime_cli.options.resolve import resolve
from slime_cli.options.unread import UNREAD

NOT_RUN = ("core/inference", "core/datasets", "core/tokenizers", "core/export", "core/post_training")
CALLED = (
    "get_model",
    "get_megatron_optimizer_config",
    "get_optimizer_param_scheduler",
    "get_megatron_ddp_config",
    "resolve_ddp_bucket_size",
    "wrap_model_chunks_with_ddp",
)
"""What slime runs of Megatron's ``training.py``."""
NAMED = """
    auto_detect_ckpt_format check_weight_hash_across_dp_replicas_interval cross_entropy_fusion_impl
    cross_entropy_loss_fusion enable_one_logger
    exit_on_missing_checkpoint finetune fp16_lm_cross_entropy log_interval log_memory_interval no_load_optim no_load_rng
    non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo
    non_persistent_local_ckpt_dir override_ckpt_iteration padded_vocab_size phase_transition_iterations
    pretrained_checkpoint save_params_interval sft tiktoken_pattern tokenizer_model tokenizer_type
    use_checkpoint_args use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args vocab_file
""".split()
"""Those that have a reader by name, which slime does not reach: it sets the value itself, or calls what reads it
otherwise."""


def words(path: pathlib.Path, pattern: str = r"\w+") -> set[str]:
    return set(re.findall(pattern, path.read_text(encoding="utf-8", errors="ignore")))


def test_nothing_that_slime_runs_names_the_others():
    megatron = pathlib.Path(importlib.util.find_spec("megatron").submodule_search_locations[0])
    core = [p for p in (megatron / "core").rglob("*.py") if not str(p.relative_to(megatron)).startswith(NOT_RUN)]
    training = [megatron / "training" / f"{name}.py" for name in ("checkpointing", "async_utils", "arguments")]
    slime = pathlib.Path(own.__file__).parents[1]
    ours = [path for path in slime.rglob("*.py") if slime / "options" not in path.parents]
    read = set().union(*map(words, core + training), *(words(path, r"\bargs\.(\w+)") for path in ours))
    loop = (megatron / "training" / "training.py").read_text()
    functions = {node.name: node for node in ast.parse(loop).body if isinstance(node, ast.FunctionDef)}
    for name in CALLED:
        read |= set(re.findall(r"\w+", ast.get_source_segment(loop, functions[name])))
    assert len(core) > 100 and "rotary_base" in read
    assert sorted(UNREAD.keys() & read) == sorted(NAMED)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--wandb-exp-name p", "--wandb-exp-name has no effect here | slime writes its own metrics"),
        ("--tensorboard-dir d", "metrics.jsonl"),
        ("--reset-position-ids", "slime feeds the trainer"),
        ("--manual-gc", "Megatron's own training loop"),
        ("--inference-dynamic-batching", "slime's engines are SGLang"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(argv, said):
    with pytest.raises(UsageError) as caught:
        resolve(argv.split())
    assert said in f"{caught.value.message} | {caught.value.fix}"
