"""Which parameters are trained: regular expressions over Megatron's names, applied before anything is built on the
model."""

import re
from collections.abc import Callable
from typing import Any

import torch

from slime_cli.errors import UsageError


class Trained:
    """``only``: patterns of what is trained, all else frozen. ``freeze``: patterns of what is frozen. Neither: all is
    trained."""

    def __init__(self, only: tuple[str, ...], freeze: tuple[str, ...]) -> None:
        self.flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
        self.only, self.patterns = bool(only), [self._compiled(p) for p in only or freeze]
        self.hits = [0] * len(self.patterns)

    def _compiled(self, pattern: str) -> re.Pattern:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"{self.flag} {pattern}: not a regular expression ({error})", "escape what is meant literally"
            ) from None

    def of(self, provider: Callable) -> Callable:
        """``provider`` with the other parameters frozen: DDP and the optimizer never see them."""
        if not self.patterns:
            return provider

        def build(*arguments: Any, **keywords: Any) -> torch.nn.Module:
            module = provider(*arguments, **keywords)
            for name, parameter in module.named_parameters():
                found = [bool(pattern.search(name)) for pattern in self.patterns]
                self.hits = [n + hit for n, hit in zip(self.hits, found)]
                parameter.requires_grad_(any(found) == self.only)
            return module

        return build

    def check(self, device: torch.device) -> None:
        """Collective. Raises UsageError for a pattern that no rank has a parameter for: a typo would train the wrong
        thing."""
        if not self.patterns:
            return
        hits = torch.tensor(self.hits, device=device)
        torch.distributed.all_reduce(hits)
        for pattern, count in zip(self.patterns, hits.tolist()):
            if not count:
                raise UsageError(
                    f"{self.flag} {pattern.pattern}: no parameter has such a name",
                    "names are Megatron's, e.g. decoder.layers.0.mlp.linear_fc1.weight",
                )
