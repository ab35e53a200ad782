"""One genuine trainer rank: ``QUANTISED PLAIN FOLDER``. It begins with the first, changes the weights as a step would,
and publishes: ``begun`` and ``trained`` in floating point, ``v000001`` in the checkpoint's format."""

import pathlib
import sys

import torch

from slime_cli.cluster.trainer_actor import TrainerRank
from slime_cli.models import architecture
from slime_cli.options.groups import SlimeOptions
from slime_cli.training.settings import Settings
from slime_cli.weights.transport import Writing

GIVEN = "--micro-batch-size 1 --global-batch-size 4 --seq-length 64 --max-position-embeddings 512 --lr 1e-3"


def main() -> None:
    model, plain, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    rank = TrainerRank(0, 1, str(folder), False, ".")
    derived = architecture.to_derive(architecture.read_config(model), {}, model)
    argv = [*architecture.argv(derived), *GIVEN.split()]
    rank.begin(argv, Settings.from_options(SlimeOptions()), model, None, rank.address())

    def publish(name: str, checkpoint: str) -> None:
        rank.hf_checkpoint = checkpoint
        rank.prepare(str(folder / name), Writing())
        rank.seal(str(folder / name), name, Writing(), [rank.publish(str(folder / name), Writing())])

    publish("begun", plain)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in rank.trainer.policy.model[0].parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    publish("trained", plain)
    publish("v000001", model)


if __name__ == "__main__":
    main()
