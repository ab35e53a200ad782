"""Ways by which weights reach engines, one a module; each is a :class:`slime_cli.weights.transport.Transport`."""

import pathlib
from collections.abc import Callable

from slime_cli.options.groups import SlimeOptions
from slime_cli.weights.transport import Transport
from slime_cli.weights.transports.adapters import Adapters
from slime_cli.weights.transports.delta import Delta
from slime_cli.weights.transports.disk import Disk
from slime_cli.weights.transports.memory import Memory


def chosen(s: SlimeOptions, folder: pathlib.Path, newest: int, say: Callable[[str], None]) -> Transport:
    """The one that the options name, for the versions of the phase in ``folder``."""
    if s.lora_rank is not None and s.lora_sync == "adapter":
        return Adapters(folder, newest)
    local = pathlib.Path(s.update_weight_local_checkpoint_dir) if s.update_weight_local_checkpoint_dir else None
    if s.update_weight_transport != "disk":
        return Memory(s.update_weight_transport, buffer=s.update_weight_buffer_size)
    if s.update_weight_mode == "full":
        return Disk(folder, newest, local=local, buffer=s.update_weight_buffer_size, say=say)
    return Delta(
        folder,
        newest,
        encoding=s.update_weight_delta_encoding,
        full_interval=s.update_weight_full_interval,
        local=local,
        buffer=s.update_weight_buffer_size,
        say=say,
    )
