"""Which devices trainer and engines run on."""

from slime_cli.options.declare import AT_LEAST_0, AT_LEAST_1, EITHER, given, group, option

_COLOCATED = given("colocate")


@group("cluster")
class Cluster:
    """Which devices trainer and engines run on."""

    actor_num_nodes: int = option(1, "Machines that hold trainer ranks.", bounds=AT_LEAST_1)
    actor_num_gpus_per_node: int = option(
        1, "Trainer ranks on each machine: GPUs, or processes on a CPU.", bounds=AT_LEAST_1, commands=EITHER
    )
    rollout_num_gpus: int = option(
        None,
        "Devices of all engines together; as many as the trainer's with --colocate.",
        bounds=AT_LEAST_0,
        commands=EITHER,
        resume="free",
    )
    rollout_num_gpus_per_engine: int = option(
        1,
        "Devices of one engine, which it uses as tensor parallel ranks.",
        bounds=AT_LEAST_1,
        commands=EITHER,
        resume="free",
    )
    colocate: bool = option(
        False, "Trainer and engines take turns on the same devices.", commands=EITHER, resume="free"
    )
    offload: bool = option(False, "--offload-train and --offload-rollout.", needs=_COLOCATED, resume="free")
    offload_train: bool = option(
        False,
        "The trainer's weights, gradients and optimizer are in the host's memory while engines generate.",
        needs=_COLOCATED,
        resume="free",
    )
    offload_rollout: bool = option(
        False,
        "Engines give their memory back while the trainer trains, and take it again for the new weights.",
        needs=_COLOCATED,
        resume="free",
    )
