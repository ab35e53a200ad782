"""Types of users' functions: one Protocol for each kind.

The signature of ``__call__`` is the only place where a kind's call is written: the check at load, the contract tests
and ``docs/hooks.md`` read it from here. Parameters before the star are passed by position. Those after it are passed by
keyword: always where they have no default, and where they have one only to a function that takes them. Torch appears in
annotations only.
"""

import types
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slime_cli.buffer.types import Sample
from slime_cli.hooks.outputs import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput

if TYPE_CHECKING:
    import torch

Args = types.SimpleNamespace
"""Every option of the run by name; in trainer ranks Megatron's arguments too."""
Reward = float | dict[str, Any]
Groups = list[list[Sample]]
Columns = MutableMapping[str, Any]


class Generate(Protocol):
    async def __call__(
        self, args: Args, sample: Sample, sampling_params: dict[str, Any], *, evaluation: bool = False
    ) -> Sample | list[Sample]: ...


class RewardOne(Protocol):
    def __call__(self, args: Args, sample: Sample) -> Reward | Awaitable[Reward]: ...


class RewardGroup(Protocol):
    def __call__(self, args: Args, samples: list[Sample]) -> list[Reward] | Awaitable[list[Reward]]: ...


class DynamicFilter(Protocol):
    def __call__(self, args: Args, samples: list[Sample]) -> DynamicFilterOutput | bool: ...


class SampleHook(Protocol):
    def __call__(self, args: Args, sample: Sample, *, rollout_id: int | None, evaluation: bool) -> Sample | None: ...


class Deals(Protocol):
    """The ``data_source`` argument of a function for a whole rollout."""

    def get_samples(self, num_samples: int) -> Groups: ...

    def add_samples(self, samples: Groups) -> None: ...


class Rollout(Protocol):
    def __call__(
        self, args: Args, rollout_id: int, data_source: Deals, *, evaluation: bool
    ) -> RolloutFnTrainOutput | RolloutFnEvalOutput: ...


class BufferFilter(Protocol):
    def __call__(self, args: Args, rollout_id: int | None, buffer: Groups, num_samples: int) -> Groups: ...


class RolloutSampleFilter(Protocol):
    def __call__(self, args: Args, data: Groups) -> None: ...


class AllSamplesProcess(Protocol):
    def __call__(self, args: Args, all_samples: Groups, data_source: Callable[[int], Groups]) -> None: ...


class RewardPostProcess(Protocol):
    def __call__(self, args: Args, samples: list[Sample]) -> tuple[Sequence[float], Sequence[float]]: ...


class ConvertSamples(Protocol):
    def __call__(self, args: Args, samples: list[Sample]) -> Columns: ...


class DataPostprocess(Protocol):
    def __call__(self, args: Args, rollout_id: int, rollout_data: Columns) -> None: ...


class RolloutLog(Protocol):
    def __call__(
        self,
        rollout_id: int,
        args: Args,
        samples: list[Sample],
        extra_metrics: dict[str, float],
        rollout_time: float,
    ) -> bool: ...


class EvalLog(Protocol):
    def __call__(
        self, rollout_id: int, args: Args, data: dict[str, dict[str, Any]], extra_metrics: dict[str, float]
    ) -> bool: ...


class DataSource(Protocol):
    def __call__(self, args: Args) -> Any: ...


class Loss(Protocol):
    def __call__(
        self,
        args: Args,
        batch: dict[str, Any],
        logits: "torch.Tensor",
        sum_of_sample_mean: "Callable[[torch.Tensor], torch.Tensor]",
    ) -> "tuple[torch.Tensor, dict[str, Any]]": ...


class Advantage(Protocol):
    def __call__(self, args: Args, rollout_data: Columns) -> None: ...


class Importance(Protocol):
    def __call__(
        self,
        args: Args,
        *,
        pg_loss: "torch.Tensor",
        train_log_probs: "list[torch.Tensor]",
        rollout_log_probs: "list[torch.Tensor]",
        loss_masks: "list[torch.Tensor]",
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> "tuple[torch.Tensor, list[torch.Tensor], dict[str, Any]]": ...


class LossReducer(Protocol):
    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: "list[torch.Tensor]",
        calculate_per_token_loss: bool,
    ) -> "Callable[[torch.Tensor], torch.Tensor]": ...


class ModelProvider(Protocol):
    def __call__(self, pre_process: bool, post_process: bool, *, vp_stage: int | None = None) -> "torch.nn.Module": ...


class MegatronInit(Protocol):
    def __call__(self, args: Args) -> None: ...


class BeforeLogProb(Protocol):
    def __call__(self, args: Args, model: "list[torch.nn.Module]", store_prefix: str) -> None: ...


class BeforeTrainStep(Protocol):
    def __call__(
        self,
        args: Args,
        rollout_id: int,
        step_id: int,
        model: "list[torch.nn.Module]",
        optimizer: Any,
        opt_param_scheduler: Any,
    ) -> None: ...


class WeightPostWrite(Protocol):
    def __call__(self, args: Args, version_dir: str, rollout_engines: list[str]) -> None: ...
