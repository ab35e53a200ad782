"""In Megatron's place in an engine's process, which has no use for it: ``adaptations.NO_MEGATRON_IN_ENGINES``."""

raise ModuleNotFoundError("slime's engines import no Megatron")
