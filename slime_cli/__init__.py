"""slime: RL post-training for LLMs, one subcommand a stage, stages joined by manifests and endpoints."""

__version__ = "0.1.0"
