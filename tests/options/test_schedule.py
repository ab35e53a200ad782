"""Which schedules and bounds fit together."""

import dataclasses

import pytest

from slime_cli.errors import UsageError
from slime_cli.options.checks import check
from slime_cli.options.derive import derived
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import resolve

GOOD = (
    "--hf-checkpoint h --prompt-data p --num-rollout 9 --rollout-batch-size 8 --n-samples-per-prompt 4 --rm-type math"
)


def checked(**values) -> list[str]:
    """Warnings of a run that has these options, whether or not a command line may give them yet."""
    found = resolve(f"{GOOD} --use-rollout-logprobs".split())
    return check(dataclasses.replace(found, slime=dataclasses.replace(found.slime, **values)))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schedule": "one-step-off", "max_staleness": 0}, "raise it to 1, or give --schedule sync"),
        ({"schedule": "async", "max_staleness": 1, "update_weights_interval": 3}, "raise --max-staleness to 2"),
        ({"max_staleness": 0, "update_weights_interval": 2}, "after 1 rollouts nothing could be generated"),
    ],
)
def test_a_bound_that_generation_cannot_keep_is_refused(values, said):
    with pytest.raises(UsageError) as caught:
        checked(**values)
    assert said in f"{caught.value.message} | {caught.value.fix}"


@pytest.mark.parametrize(
    "values",
    [
        {"schedule": "one-step-off", "max_staleness": 1},
        {"schedule": "async", "max_staleness": 0},
        {"schedule": "async", "max_staleness": 1, "update_weights_interval": 2},
        {"max_staleness": None, "update_weights_interval": 9},
    ],
)
def test_a_bound_that_can_be_kept_passes(values):
    assert checked(**values) == []


@pytest.mark.parametrize(("schedule", "bound"), [("sync", None), ("one-step-off", 1), ("async", 1)])
def test_generation_beside_training_is_one_rollout_behind_unless_told_otherwise(schedule, bound):
    assert derived(SlimeOptions(schedule=schedule), {}, {}).get(("slime", "max_staleness")) == bound
    assert ("slime", "max_staleness") not in derived(SlimeOptions(schedule=schedule, max_staleness=4), {}, {})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schedule": "one-step-off", "max_staleness": 1}, "no more than 8 groups can be under way"),
        ({"schedule": "one-step-off", "max_staleness": 2}, None),
        ({"max_staleness": 0}, "no more than 8 groups can be under way"),
        ({"max_staleness": 1}, None),
        ({"max_staleness": None}, None),
        (
            {"schedule": "async", "max_staleness": 4},
            "--over-sampling-batch-size 16 has no effect with --schedule async",
        ),
    ],
)
def test_a_surplus_that_the_bound_does_not_allow_is_a_warning(values, said):
    partial = values.get("schedule") != "async"
    found = checked(over_sampling_batch_size=16, partial_rollout=partial, **values)
    assert (len(found) == 1 and said in found[0]) if said else not found


@pytest.mark.parametrize(("schedule", "masked", "warns"), [("async", False, 1), ("async", True, 0), ("sync", False, 0)])
def test_partial_rollouts_have_nothing_to_give_back_where_groups_flow(schedule, masked, warns):
    given = dict(schedule=schedule, max_staleness=4, partial_rollout=True, mask_offpolicy_in_partial_rollout=masked)
    found = checked(**given)
    assert [text.startswith("--partial-rollout has no effect with --schedule async") for text in found] == [
        True
    ] * warns
