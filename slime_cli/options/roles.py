"""``--megatron-config-path``: Megatron options of one role among those that train together, over the run's own.

```yaml
megatron:
  - role: critic
    lr: 1.0e-5
    lr_warmup_iters: 20
```
"""

from typing import Any

from slime_cli.errors import UsageError
from slime_cli.options import characters
from slime_cli.options.layers import from_map
from slime_cli.options.spec import UNSET

ROLES = ("critic",)


def read(path: str, role: str) -> dict[str, Any]:
    """Options by dest that the file gives ``role``; none when it does not name it. Raises UsageError for what does not
    fit."""
    content = characters.read(path, f"--megatron-config-path {path}")
    entries = content.get("megatron") if isinstance(content, dict) and set(content) == {"megatron"} else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(
            f"--megatron-config-path {path}: must hold `megatron:` with a list of maps",
            "each with `role:` and Megatron options",
        )
    roles = [entry.get("role") for entry in entries]
    if unknown := [r for r in roles if r not in ROLES]:
        raise UsageError(f"--megatron-config-path {path}: role {unknown[0]!r}", f"roles are {', '.join(ROLES)}")
    if len(set(roles)) < len(roles):
        raise UsageError(f"--megatron-config-path {path}: a role is there twice", "keep one entry for each")
    if role not in roles:
        return {}
    options = {key: value for key, value in entries[roles.index(role)].items() if key != "role"}
    found = from_map({"megatron": options}, f"--megatron-config-path {path}: {role}")
    return {dest: value for (_, dest), value in found.items() if value is not UNSET}
