"""Where prompts come from, and how a row becomes a prompt."""

from typing import Any, Literal

from slime_cli.options.declare import group, option


@group("data")
class Data:
    """Where prompts come from, and how a row becomes a prompt."""

    prompt_data: str = option(None, "JSON lines or Parquet of prompts, or reasoning-gym:TASK.")
    input_key: str = option("input", "Field of a row that holds the prompt.")
    label_key: str | None = option(None, "Field of a row that holds the expected answer.")
    metadata_key: str = option("metadata", "Field of a row that travels with its samples.")
    tool_key: str = option("tools", "Field of a row that lists tools for the chat template.")
    apply_chat_template: bool = option(False, "Render the prompt's messages with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] = option({}, "JSON object of extra arguments for the chat template.")
    special_tokens_in_data: Literal["text", "refuse", "allow"] | None = option(
        None,
        "Control tokens in a row's own text: taken as text (with a chat template), refused (without), or "
        "allowed as control tokens.",
    )
    on_bad_row: Literal["fail", "skip"] = option(
        "fail", "A row that cannot be used ends the run, or is counted and passed over.", resume="free"
    )
