"""Numbers out of any sense are refused, for slime's own options and for the engines', before they are counted with."""

import math

import pytest

from slime_cli.errors import UsageError
from slime_cli.options import catalogue, own
from slime_cli.options.checks import check
from slime_cli.options.checks.bounds import NATIVE
from slime_cli.options.declare import Bounds
from slime_cli.options.resolve import resolve

GOOD = (
    "--hf-checkpoint h --prompt-data p --num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4 --rm-type math"
)


def refused(more: str, command: str = "train", base: str = GOOD) -> str:
    with pytest.raises(UsageError) as caught:
        check(resolve(f"{base} {more}".split(), command=command))
    return f"{caught.value.message} | {caught.value.fix}"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--lr -1", "--lr is -1.0 | it must be at least 0"),
        ("--num-experts 4 --moe-aux-loss-coeff 0 -1", "--moe-aux-loss-coeff is -1.0"),
        ("--lr inf", "--lr is inf"),
        ("--min-lr -1e-9", "--min-lr is -1e-09"),
        ("--min-lr 1e-3 --lr 1e-4", "--min-lr 0.001 is above --lr 0.0001"),
        ("--min-lr 1e-3", "is above --lr 1e-06"),
        ("--weight-decay -0.1", "--weight-decay is -0.1"),
        ("--adam-beta1 1", "--adam-beta1 is 1.0 | it must be at least 0 and below 1"),
        ("--clip-grad -1", "--clip-grad is -1.0"),
        ("--lr-warmup-fraction 1.5", "it must be between 0 and 1"),
        ("--seed 0", "--seed is 0"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size is 0"),
        ("--pipeline-model-parallel-size -1 --context-parallel-size 0", "2 options are out of range"),
        ("--micro-batch-size 0", "--micro-batch-size is 0"),
        ("--global-batch-size -4", "--global-batch-size is -4"),
        ("--n-samples-per-prompt 0", "--n-samples-per-prompt is 0"),
        ("--num-layers 0", "--num-layers is 0"),
        ("--hidden-dropout 1", "--hidden-dropout is 1.0"),
        ("--num-attention-heads 8 --num-query-groups 3", "--num-attention-heads 8 is not a multiple of"),
        ("--num-experts 4 --moe-router-topk 8", "--moe-router-topk 8 is more than --num-experts 4"),
        ("--rollout-top-k 0", "--rollout-top-k is 0 | it must be -1 or at least 1"),
        ("--rollout-top-p 1.1", "--rollout-top-p is 1.1"),
        ("--rollout-temperature inf", "--rollout-temperature is inf"),
        ("--eval-temperature -1", "--eval-temperature is -1.0"),
        ("--rollout-seed -1", "--rollout-seed is -1"),
        ("--rollout-num-gpus -1", "--rollout-num-gpus is -1"),
        ("--kl-loss-coef -1 --use-kl-loss", "--kl-loss-coef is -1.0"),
        ("--rm-timeout 0", "--rm-timeout is 0.0 | it must be above 0"),
        ("--rm-url h:1", "--rm-url h:1: not an address"),
        ("--rm-type boxed_remote_rm", "--rm-type boxed_remote_rm needs --rm-url"),
        ("--sglang-mem-fraction-static 1.5", "--sglang-mem-fraction-static is 1.5"),
        ("--sglang-context-length 0", "--sglang-context-length is 0"),
        ("--router-request-timeout-secs 0", "--router-request-timeout-secs is 0"),
        ("--sglang-router-port 80000", "--sglang-router-port is 80000 | it must be between 1 and 65535"),
        ("--sglang-router-port 0", "--sglang-router-port is 0"),
        ("--sglang-router-port=-1", "--sglang-router-port is -1"),
        ("--freeze-params-name-list [", "--freeze-params-name-list [: not a regular expression"),
    ],
)
def test_a_number_out_of_any_sense_is_refused(more, said):
    assert said in refused(more)


def test_serve_rollout_refuses_them_too():
    assert "between 1 and 65535" in refused("--sglang-router-port 0", "serve-rollout", "--hf-checkpoint h")


def test_what_makes_sense_passes():
    more = (
        "--lr 0 --clip-grad 0 --adam-beta1 0 --rollout-top-k -1 --eval-temperature 0 --eval-prompt-data e "
        "--rm-timeout 0.5 --moe-aux-loss-coeff 0 --sglang-chunked-prefill-size -1 --rollout-seed 0 "
        "--rotary-percent 0.25"
    )
    assert check(resolve(f"{GOOD} {more}".split())) == []


def test_every_bound_is_of_an_option_that_takes_numbers():
    assert all(option.type in ("int", "float") for option in own.OPTIONS if option.bounds)
    for (section, _), dests in NATIVE.items():
        for dest in dests.split():
            assert catalogue.load(section).by_dest[dest][0].type in ("int", "float", "other"), dest


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "said"),
    [
        (Bounds(ge=0), (0, 0.5, 1e9), (-1e-9, math.inf, math.nan), "at least 0"),
        (Bounds(gt=0, le=1), (1e-9, 1), (0, 1.1), "above 0 and at most 1"),
        (Bounds(ge=0, lt=1), (0, 0.9), (1, -1), "at least 0 and below 1"),
        (Bounds(ge=0, le=1), (0, 1), (-0.1, 1.1), "between 0 and 1"),
        (Bounds(ge=1, also=(-1,)), (-1, 1), (0, -2), "-1 or at least 1"),
        (Bounds(ge=0, also=(math.inf,)), (0, math.inf), (-1, -math.inf, math.nan), "at least 0, or inf"),
    ],
)
def test_bounds_allow_what_they_say(bounds, inside, outside, said):
    assert all(map(bounds.allow, inside)) and not any(map(bounds.allow, outside))
    assert str(bounds) == said


def test_every_number_of_slimes_own_is_bounded_or_free_for_a_reason():
    bounded = {option.dest for option in own.OPTIONS if option.bounds}
    free = {
        "rollout_temperature",
        "eps_clip",
        "eps_clip_high",
        "eps_clip_c",
        "tis_clip",
        "tis_clip_low",
        "rs_lower_bound",
        "rs_upper_bound",  # bounded together with others, in the checks of their subjects
        "entropy_coef",
        "stop_at_loss",  # any number makes sense
    }
    numbers = {option.dest for option in own.OPTIONS if option.type in ("int", "float") and not option.many}
    assert numbers - bounded == free, "a number of slime's own is declared with its bounds"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--load", ""], "--load is empty"),
        (["--input-key="], "--input-key is empty"),
        (["--rollout-stop", "</a>", ""], "--rollout-stop is empty"),
        (["--save=~/checkpoints"], "--save is ~/checkpoints, with a ~ that no shell has replaced"),
    ],
)
def test_a_text_of_nothing_or_with_a_home_that_no_shell_has_replaced_is_refused(words, said):
    """Taken as they are, the one is silently another option's default, the other a folder called ~."""
    with pytest.raises(UsageError) as caught:
        check(resolve([*GOOD.split(), *words], [], "train"))
    assert said in caught.value.message


def test_so_is_such_a_text_of_a_profile(tmp_path):
    (tmp_path / "mine.yaml").write_text("slime: {run-dir: ~/runs/one}")
    with pytest.raises(UsageError, match="--run-dir is ~/runs/one, with a ~"):
        check(resolve(GOOD.split(), [str(tmp_path / "mine.yaml")], "train"))
