"""Where prompts come from, and how a row becomes a prompt."""

from typing import Any, Literal

from slime_cli.options.declare import SUPERVISED, group, option


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
    special_tokens_in_data: Literal["text", "keep", "refuse"] | None = option(
        None,
        "Control tokens in a row's own text: taken as text (with a chat template), refused (without), or kept "
        "as control tokens.",
    )
    on_rewritten_turns: Literal["fan-out", "keep", "refuse"] = option(
        "fan-out",
        "A conversation whose chat template rewrites earlier turns: a sample for each stretch that only grows, "
        "siblings of one trajectory; one sample that keeps each turn as it was trained; or a bad row.",
        needs=SUPERVISED,
    )
    opened_thinking: Literal["fill", "cut", "refuse"] = option(
        "fill",
        "A generation prompt that opens <think> where the template's own turn does not: the answer fills and closes "
        "it, the opening is cut off, or the row is bad.",
        needs=SUPERVISED,
    )
    on_bad_row: Literal["fail", "skip"] = option(
        "fail", "A row that cannot be used ends the run, or is counted and passed over.", resume="free"
    )
