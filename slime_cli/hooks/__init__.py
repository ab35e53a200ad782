"""The public API that users' functions import. Importing it costs no torch; ``docs/hooks.md`` is its page."""

from slime_cli.buffer.types import Sample, Span, Status
from slime_cli.hooks.client import Engine, EngineClient, engine
from slime_cli.hooks.outputs import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime_cli.hooks.text import append_text, encode, new_sample, render, tokenizer

__all__ = [
    "DynamicFilterOutput",
    "Engine",
    "EngineClient",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "Span",
    "Status",
    "append_text",
    "encode",
    "engine",
    "new_sample",
    "render",
    "tokenizer",
]
