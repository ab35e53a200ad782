"""One strict resolution of a command's options: default < profiles in order < (phase) < flags, then what follows.

:func:`resolve` raises UsageError for whatever cannot be understood; whether the values fit together is for
:mod:`slime_cli.options.checks`. Nothing here imports an engine.
"""

import copy
import pathlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_cli.options import catalogue, custom, own
from slime_cli.options.derive import derived
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.layers import SECTIONS, Layer, from_argv, from_map
from slime_cli.options.profiles import load as load_profile
from slime_cli.options.spec import UNSET, to_words


@dataclass(frozen=True)
class Resolved:
    """All options of one command. Treat the maps as frozen too: copies are made by :meth:`for_phase`."""

    slime: SlimeOptions
    """slime's own options."""
    megatron: dict[str, Any]
    """Native options that differ from the engine's default because somebody, or slime, set them; dest -> value."""
    sglang: dict[str, Any]
    router: dict[str, Any]
    origins: dict[str, str]
    """"section.dest" -> "default", "derived", "profile NAME", "phase NAME" or "flag"; for every value above."""
    phases: tuple[dict[str, Any], ...] = ()
    """The profile's phases as written: ``name`` and section maps."""
    command: str = "train"
    profiles: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Warnings from reading the command line."""
    custom: dict[str, Any] = field(default_factory=dict)
    """Values of ``--custom-config-path`` for users' functions alone."""
    phase_file: str = field(default="", repr=False)
    """File that ``phases`` came from, for messages."""

    def values(self, section: str) -> Mapping[str, Any]:
        """Every value of a section by dest."""
        values = getattr(self, section)
        return vars(values) if isinstance(values, SlimeOptions) else values

    def native_argv(self, section: str) -> list[str]:
        """Words that make the genuine parser of ``section`` store exactly what is set."""
        table = catalogue.load(section)
        return [
            word
            for dest, value in self.values(section).items()
            for word in to_words(table.option_for(dest, value), value)
        ]

    def megatron_argv(self) -> list[str]:
        return self.native_argv("megatron")

    def sglang_argv(self) -> list[str]:
        return self.native_argv("sglang")

    def router_argv(self) -> list[str]:
        return self.native_argv("router")

    def for_phase(self, index: int) -> "Resolved":
        """The options of one phase: its map over defaults and profiles, beneath flags; derived values made anew.

        What comes back has no phases of its own.
        """
        phase = self.phases[index]
        layer = from_map(phase, f"{self.phase_file}: phase {index + 1}")
        build = _Build.of(self)
        build.lay(
            {key: value for key, value in layer.items() if build.origins.get(key) not in ("flag", custom.ORIGIN)},
            f"phase {phase['name']}",
        )
        return build.done(replace(self, phases=(), phase_file=""))

    def given(self, section: str, dest: str) -> bool:
        """Somebody set it: a profile, a phase or a flag."""
        return self.origins.get(f"{section}.{dest}", "default") not in ("default", "derived")

    def taken_back(self, section: str, dest: str) -> bool:
        """Somebody took a native flag back: what slime would give by itself is not wanted either."""
        return self.given(section, dest) and dest not in self.values(section)


def resolve(argv: Sequence[str], profiles: Sequence[str] = (), command: str = "train") -> Resolved:
    """Resolves a command line (without the command's name and ``--profile``) over profiles, later over earlier."""
    build = _Build.defaults()
    phases = ()
    phase_file = ""
    for profile in map(load_profile, profiles):
        build.lay(profile.layer, f"profile {profile.name}")
        if profile.phases:
            phases = profile.phases
            phase_file = str(profile.path)
    layer, warnings = from_argv(list(argv), command)
    build.lay(layer, "flag")
    extra = _lay_custom(build, layer, warnings)
    frame = Resolved(
        slime=build.own(),
        megatron={},
        sglang={},
        router={},
        origins={},
        phases=phases,
        command=command,
        profiles=tuple(profiles),
        argv=tuple(own.without_secrets(argv)),
        warnings=tuple(warnings),
        phase_file=phase_file,
        custom=extra,
    )
    return build.done(frame)


def _lay_custom(build: "_Build", flags: Layer, warnings: list[str]) -> dict[str, Any]:
    """Lays the options of ``--custom-config-path`` over the others; what else the file holds. Adds to ``warnings``."""
    path = build.values["slime", "custom_config_path"]
    if path is None or not pathlib.Path(path).exists():  # the run refuses it, a dry run says that it is not there
        return {}
    layer, extra = custom.read(path)
    for (section, dest), value in layer.items():
        if (section, dest) in flags and flags[section, dest] != value:
            flag = own.flag(dest) if section == "slime" else f"--{dest.replace('_', '-')}"
            said = f"{flag} is {flags[section, dest]} on the command line, and {value} in {path}, which holds"
            warnings.append(said)
    build.lay(layer, custom.ORIGIN)
    return extra


def args_namespace(resolved: Resolved) -> types.SimpleNamespace:
    """The ``args`` of users' functions: options of slime's by dest, Megatron's that are set, a file's values."""
    return types.SimpleNamespace(**resolved.megatron | vars(resolved.slime) | resolved.custom)


EXCLUDES = {("slime", "rollout_endpoint"): ("slime", "colocate")}
"""Option -> another that it takes back where a lower layer gave it: a run of a colocating profile can be pointed at
engines."""


@dataclass
class _Build:
    """Values and origins while layers are laid one over another."""

    values: dict[tuple[str, str], Any]
    origins: dict[tuple[str, str], str]

    @classmethod
    def defaults(cls) -> "_Build":
        values = {("slime", option.dest): copy.deepcopy(option.default) for option in own.OPTIONS}
        for section, native in own.NATIVE_DEFAULTS.items():
            values |= {(section, dest): value for dest, value in native.items()}
        return cls(values, dict.fromkeys(values, "default"))

    @classmethod
    def of(cls, resolved: Resolved) -> "_Build":
        """Resolved options with derived values taken back to their defaults."""
        build = cls.defaults()
        for name, origin in resolved.origins.items():
            section, _, dest = name.partition(".")
            key = (section, dest)
            if origin not in ("default", "derived"):
                build.origins[key] = origin
                if dest in resolved.values(section):
                    build.values[key] = resolved.values(section)[dest]
                else:
                    build.values.pop(key, None)
        return build

    def lay(self, layer: Layer, origin: str) -> None:
        undone = {other: UNSET for key, other in EXCLUDES.items() if key in layer and other not in layer}
        layer = undone | layer
        start = _Build.defaults().values if UNSET in layer.values() else {}
        for key, value in layer.items():
            self.origins[key] = origin
            if value is not UNSET:
                self.values[key] = value
            elif key in start and key[0] == "slime":  # a native flag that slime gives is taken back as well
                self.values[key] = start[key]
            else:
                self.values.pop(key, None)

    def section(self, name: str) -> dict[str, Any]:
        return {dest: value for (section, dest), value in self.values.items() if section == name}

    def own(self) -> SlimeOptions:
        return SlimeOptions(**self.section("slime"))

    def done(self, frame: Resolved) -> Resolved:
        given = {key for key, origin in self.origins.items() if origin not in ("default", "derived")}
        taken_back = given - self.values.keys()
        extra = derived(self.own(), self.section("megatron"), self.section("sglang"), taken_back)
        self.values |= extra
        self.origins |= dict.fromkeys(extra, "derived")
        origins = {f"{section}.{dest}": origin for (section, dest), origin in self.origins.items()}
        native = {name: self.section(name) for name in SECTIONS if name != "slime"}
        return replace(frame, slime=self.own(), **native, origins=origins)
