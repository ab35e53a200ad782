"""Imports point one way. Read from the syntax tree, so imports inside functions and for type checkers count as well.

1. A room imports only rooms of lower tiers.
2. No stage imports another one: they share manifests, endpoints and the types of TYPES.
3. Files do not import each other in a circle.
4. Torch, Megatron, SGLang and Ray are imported when a module loads only where HEAVY says so, whoever asks for it.
5. What is not so yet is listed below; a line that is no longer needed fails, so that the lists only shrink.
"""

import ast
import functools
import pathlib
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "slime_cli"
TYPES = ("buffer.types", "buffer.values", "buffer.columns")
"""What samples are: read by every stage, and by users' functions. These import one another and tiers below."""
STAGES = ("rollout", "rewards", "serving", "training", "weights", "convert", "buffer")
TIERS = (
    ("errors",),
    (
        "addresses",
        "disk",
        "engine_api",
        "event_loop",
        "findings",
        "gym",
        "installed",
        "interrupts",
        "locks",
        "plain",
        "processes",
        "screen",
        "text",
    ),
    ("manifests", "hardware"),
    ("types",),
    ("options",),
    ("models", "tracing"),
    ("hooks", "profiling"),
    STAGES,
    ("cluster",),
    ("loop",),
    ("run",),
    ("commands",),
    ("app",),
    ("__main__",),
)
BASE = TIERS[1]
"""Small modules beside the rooms; they may use one another."""
HEAVY = {"torch", "megatron", "sglang", "ray", "transformer_engine"}
HEAVY_ALLOWED = ("hardware", "training", "weights", "convert", "models.quantise")

UPWARD = {
    ("tracing.ledger", "buffer.journal"),
}
"""Imports against rules 1 and 2 that are still there."""
LOADS_HEAVY: set[str] = set()
"""Modules against rule 4 that are still there."""


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its name below ``slime_cli``; the package itself is ``""``."""
    out = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


def named(node: ast.AST) -> Iterator[str]:
    """Modules, or names in modules, that an import statement asks for."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports are not used here"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(name: str) -> str | None:
    """The module of ours that holds ``name``."""
    if name.partition(".")[0] != PACKAGE:
        return None
    name = name.removeprefix(PACKAGE).removeprefix(".")
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Modules of ours that the file names anywhere; a package's ``__init__`` runs too, and is left out of it."""
    tree = ast.parse(modules()[module].read_text())
    found = {own(name) for node in ast.walk(tree) for name in named(node)}
    return frozenset(name for name in found if name and name != module)


def loaded(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when a module loads."""
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
            continue
        yield node
        left += ast.iter_child_nodes(node)


@functools.cache
def at_load(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """What a module imports when it loads: modules of ours, and libraries."""
    names = {name for node in loaded(ast.parse(modules()[module].read_text())) for name in named(node)}
    ours = {found for name in names if (found := own(name))}
    packages = {above for name in (module, *ours) for above in parents(name) if above in modules()}
    others = {name.partition(".")[0] for name in names if own(name) is None}
    if any(name.startswith("safetensors.torch") for name in names):
        others.add("torch")
    return frozenset((ours | packages) - {module}), frozenset(others)


def parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def heavy(module: str) -> dict[str, list[str]]:
    """Heavy libraries that loading ``module`` loads, each with the chain of modules that leads to it."""
    found: dict[str, list[str]] = {}
    chains = {module: [module]}
    left = [module]
    while left:
        name = left.pop()
        ours, others = at_load(name)
        for library in others & HEAVY:
            found.setdefault(library, chains[name])
        for other in ours - chains.keys():
            chains[other] = [*chains[name], other]
            left.append(other)
    return found


def room(module: str) -> str:
    return "types" if module in TYPES else module.partition(".")[0]


def tier(module: str) -> int:
    return next(i for i, rooms in enumerate(TIERS) if room(module) in rooms)


def allowed(module: str, other: str) -> bool:
    if not module or not other or room(module) == room(other):
        return True
    return tier(other) < tier(module) or (room(module) in BASE and room(other) in BASE)


def circles(edges: dict[str, Iterable[str]]) -> list[list[str]]:
    """Groups of files that lead to themselves."""
    reach = {}
    for start in edges:
        seen: set[str] = set()
        left = list(edges[start])
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += edges.get(name, ())
        reach[start] = seen
    return sorted({tuple(sorted(b for b in reach[a] if a in reach[b])) for a in reach if a in reach[a]})


def test_every_room_has_a_tier():
    known = {name for rooms in TIERS for name in rooms}
    assert {room(name) for name in modules() if name} - known == {"profiles"}  # data, with an empty __init__


def test_imports_point_one_way_and_no_stage_imports_another():
    against = {(a, b) for a in modules() for b in imports(a) if a and room(a) != "profiles" and not allowed(a, b)}
    assert against - UPWARD == set(), "imports that point upwards, or from a stage to another"
    assert UPWARD - against == set(), "these are gone: take them out of UPWARD"


def test_files_do_not_import_each_other_in_a_circle():
    assert circles({name: imports(name) for name in modules()}) == []


def test_heavy_libraries_load_only_where_they_may():
    found = {}
    for module in modules():
        if not f"{module}.".startswith(tuple(f"{name}." for name in HEAVY_ALLOWED)) and (what := heavy(module)):
            found[module] = what
    assert {name: found[name] for name in found.keys() - LOADS_HEAVY} == {}
    assert LOADS_HEAVY - found.keys() == set(), "these are gone: take them out of LOADS_HEAVY"


def test_a_circle_and_a_library_behind_a_chain_are_found():
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [("a", "b", "c")]
    assert heavy("convert.requantise")["torch"][0] == "convert.requantise"
    assert not allowed("rollout.generate", "buffer.buffer") and allowed("rollout.generate", "buffer.types")
    assert not allowed("loop.phase", "run") and allowed("run", "loop.phase")
