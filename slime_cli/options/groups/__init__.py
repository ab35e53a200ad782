"""slime's own options by subject: each declared once, as a field of a frozen dataclass.

:class:`SlimeOptions` has all of them, flat, and is what every stage reads: ``s.num_rollout``.
"""

from dataclasses import dataclass

from slime_cli.options.groups.algorithm import Algorithm
from slime_cli.options.groups.batch import Batch
from slime_cli.options.groups.cluster import Cluster
from slime_cli.options.groups.data import Data
from slime_cli.options.groups.debug import Debug
from slime_cli.options.groups.evaluation import Evaluation
from slime_cli.options.groups.functions import Functions
from slime_cli.options.groups.launch_script import LaunchScript
from slime_cli.options.groups.lora import Lora
from slime_cli.options.groups.model import Model
from slime_cli.options.groups.off_policy import OffPolicy
from slime_cli.options.groups.reward import Reward
from slime_cli.options.groups.rollout import Rollout
from slime_cli.options.groups.run import Run
from slime_cli.options.groups.schedule import Schedule
from slime_cli.options.groups.tracking import Tracking
from slime_cli.options.groups.training import Training
from slime_cli.options.groups.weights import Weights


@dataclass(frozen=True, kw_only=True)
class SlimeOptions(
    Cluster,
    Model,
    Rollout,
    Schedule,
    Data,
    Batch,
    Reward,
    Evaluation,
    Training,
    Lora,
    Algorithm,
    OffPolicy,
    Weights,
    Functions,
    Run,
    Debug,
    Tracking,
    LaunchScript,
):
    """Every option of slime's own, resolved. A value that differs is made by ``dataclasses.replace``."""

    @property
    def generates(self) -> bool:
        """There are engines: samples are generated, or answers to evaluate."""
        return self.loss_type != "sft_loss" and not self.debug_train_only


GROUPS = SlimeOptions.__bases__
"""In the order of ``--help``."""
