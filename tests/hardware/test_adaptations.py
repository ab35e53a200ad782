"""The run-time adaptations of stock libraries.

1. Code that adapts a library is in hardware/, in a function or class that goes through ``adaptations``.
2. Every listed adaptation is made somewhere, and names a test that exists; the page says the same.
3. An adaptation raises where the library has not what it replaces. The versions that they were made for are named here.
"""

import ast
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

from ci import adaptations_page
from slime_cli import installed
from slime_cli.errors import EngineError
from slime_cli.hardware import adaptations, device

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "slime_cli"
MADE_FOR = {"torch": "2.11.0", "megatron-core": "0.19.2", "megatron-bridge": "0.6.2", "sglang": "0.5.16"}
"""A pin has changed: look at every adaptation of that library (docs/adaptations.md), then change this."""
OURS = {
    "hardware/adaptations.py": "what all adaptations go through",
    "hooks/files.py": "modules of users' files, under names of slime's own",
    "processes.py": "this interpreter's import path, so that the working directory is not on it",
    "rewards/sandbox_child.py": "a process that runs one answer, as a script's own __main__",
}
"""Files that change Python's own tables, not a library's."""
READS = {
    "_asdict": "public, of named tuples",
    "_foreach_copy_": "torch has no other call that copies many tensors at once, and its own optimizers use it",
    "_actions": "argparse has no other list of a parser's options",
    "_init_weights": "transformers gives a layer that is made later its first values by nothing else",
    "_non_persistent_buffers_set": "torch has no other way to tell such buffers from those of a checkpoint",
}
"""Private names that are read or called, and nothing is changed."""


# -- finding adaptations -----------------------------------------------------------------------------------------------


def foreign_names(tree: ast.AST) -> dict[str, str]:
    """Names that a file binds to modules, or things in modules, that are neither ours nor Python's: -> where from."""
    out = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                out[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            out |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and root(node.value) in out:
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            out |= {name: f"{out[root(node.value)]}..." for name in names}
    top = {name: where.partition(".")[0] for name, where in out.items()}
    return {name: out[name] for name, where in top.items() if where not in (*sys.stdlib_module_names, "slime_cli")}


def root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def targets(node: ast.AST) -> list[ast.expr]:
    found = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [part for target in found if target is not None for part in getattr(target, "elts", [target])]


@functools.cache
def source_defines(where: str, name: str) -> bool:
    """Whether the file that a foreign class is in defines a method of that name. Read, not imported."""
    parts = where.split(".")[:-1]
    if not parts:  # the base is no library's
        return False
    top = importlib.util.find_spec(parts[0])
    if top is None or not top.submodule_search_locations:
        return False
    file = pathlib.Path(list(top.submodule_search_locations)[0]).joinpath(*parts[1:])
    text = [path for path in (file.with_suffix(".py"), file / "__init__.py") if path.is_file()]
    return any(f"def {name}(" in path.read_text() for path in text)


@functools.cache
def own_private_names() -> frozenset[str]:
    """Private names that slime itself defines or assigns."""
    out = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                out.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and path.parts[-2] != "hardware":
                out |= {t.attr if isinstance(t, ast.Attribute) else getattr(t, "id", "") for t in targets(node)}
    return frozenset(name for name in out if name.startswith("_"))


def adapting(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Nodes that change or lean on the inside of a library, and what they do."""
    foreign = foreign_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in targets(node):
                text = ast.unparse(target)
                if isinstance(target, ast.Attribute) and (root(target) in foreign or target.attr == "__class__"):
                    yield node, f"assigns {text}"
                elif text == "sys.argv" or text.startswith(("sys.modules[", "sys.path[")):
                    yield node, f"assigns {text}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and root(node.args[0]) in foreign:
            yield node, f"sets an attribute of {ast.unparse(node.args[0])}"
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
                    private = method.name.startswith("_") and not method.name.startswith("__")
                    if private and source_defines(foreign.get(root(base), ""), method.name):
                        yield node, f"overrides {ast.unparse(base)}.{method.name}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            known = root(node) in ("self", "cls", "sys", "os", "inspect") or node.attr in own_private_names()
            if not known and node.attr not in READS:
                yield node, f"uses the private {ast.unparse(node)}"


def unlisted(tree: ast.Module, *, inside: bool) -> list[str]:
    """What adapts a library and does not go through ``adaptations``. ``inside``: the file is in hardware/."""
    out = []
    for part in tree.body:
        listed = inside and "adaptations." in ast.unparse(part)
        lines = {node.lineno for node in ast.walk(part) if hasattr(node, "lineno")}
        out += [f"line {node.lineno} {what}" for node, what in adapting(tree) if node.lineno in lines and not listed]
    return sorted(set(out))


def test_code_that_adapts_a_library_is_in_hardware_and_listed():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if name not in OURS and (what := unlisted(ast.parse(path.read_text()), inside=name.startswith("hardware/"))):
            found[name] = what
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.cuda.current_device = lambda: 0",
        "import torch\ndef f():\n    cuda = torch.cuda\n    cuda.synchronize = None",
        "import megatron.core as m\nsetattr(m, 'x', 1)",
        "import sys\nsys.modules['sgl_kernel'] = None",
        "def f(module, kind):\n    module.__class__ = kind",
        "def f(inner):\n    inner._init_optimizer_states_with_dummy_values()",
        "from megatron.core.transformer.multi_latent_attention import MLASelfAttention\n"
        "class A(MLASelfAttention):\n    def _resolve_qk_norm_config(self): pass",
    ],
)
def test_an_adaptation_is_found(text):
    assert unlisted(ast.parse(text), inside=False)
    assert unlisted(ast.parse(text), inside=True)


def test_what_is_no_adaptation_is_not_found():
    assert not unlisted(ast.parse("import torch\nx = torch.zeros(3)\nx.requires_grad = True"), inside=False)


# -- the list ----------------------------------------------------------------------------------------------------------


def test_every_adaptation_is_made_and_tested():
    assert {name for name, places in adaptations_page.uses().items() if not places} == set()
    assert {one.test for one in adaptations.ALL.values() if not (ROOT / one.test).is_file()} == set()


def test_the_page_is_the_list():
    text = adaptations_page.PAGE.read_text()
    assert adaptations_page.page(text) == text, "run python ci/adaptations_page.py"


def test_the_versions_that_they_were_made_for():
    assert {one.library: one.version for one in adaptations.ALL.values()} == MADE_FOR
    assert {name: installed.version(name) for name in MADE_FOR} == MADE_FOR


def test_a_library_without_what_is_replaced_is_an_error():
    library = types.SimpleNamespace(__name__="megatron.core", there=1)
    adaptations.COMMAND_LINE.replace(library, there=2)
    assert library.there == 2
    with pytest.raises(EngineError, match=r"megatron-core 0\.19\.2: megatron\.core has no gone, which slime adapts"):
        adaptations.COMMAND_LINE.replace(library, gone=2)
    assert not hasattr(library, "gone")

    class Base:
        def _there(self) -> None: ...

    with pytest.raises(EngineError, match="Base has no _gone to override"):

        @adaptations.LATENT_ATTENTION.overrides("_gone")
        class Derived(Base):
            def _gone(self) -> None: ...


# -- effects -----------------------------------------------------------------------------------------------------------

MEGATRON_ON_A_CPU = """
import json, sys
from slime_cli.hardware import device
device.prepare_trainer()
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import token_dispatcher
from slime_cli.training.network import megatron

tracker = tensor_parallel.get_cuda_rng_tracker()
tracker.add("ours", 7)
def drawn():
    with tracker.fork("ours"):
        return torch.rand(2).tolist()
torch.manual_seed(3)
outside = torch.rand(2).tolist()
first = drawn()
torch.manual_seed(3)
state, before = tracker.get_states(), list(sys.argv)
again = torch.rand(2).tolist()
tracker.reset(); tracker.add("ours", 7)
lists = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([2, 3]), as_numpy=True).tolist()
words = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8"
words += " --vocab-size 8 --global-batch-size 1 --async-save --save nowhere --save-interval 1"
args = megatron.parse(megatron.always(device.find()) + words.split(), 0, 1)
print(json.dumps({"tracked": first == drawn(), "apart": outside == again, "lists": lists, "layers": args.num_layers,
                  "asynchronous": args.async_save, "line": sys.argv == before}))
"""


def on_a_cpu(program: str, **environment: str) -> str:
    found = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=found)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.engine
def test_megatron_on_a_cpu():
    found = json.loads(on_a_cpu(MEGATRON_ON_A_CPU).splitlines()[-1])
    assert found == {
        "tracked": True, "apart": True, "lists": [2, 3], "layers": 1, "asynchronous": True, "line": True,
    }  # fmt: skip


def test_a_kernel_of_the_stand_in_raises_when_it_is_called():
    folder = str(PACKAGE / "hardware" / "cpu")
    program = "import sgl_kernel\ntry:\n    sgl_kernel.silu_and_mul(1)\nexcept NotImplementedError as error:\n"
    found = on_a_cpu(f"{program}    print(error)", PYTHONPATH=os.pathsep.join([folder, str(ROOT)]))
    assert found.strip() == "sgl_kernel.silu_and_mul has no CPU implementation"


def test_an_engine_imports_no_megatron_and_its_memory_saver_stays_as_it_was():
    environment = device.engine_environment({"PYTHONPATH": str(ROOT)})
    program = (
        "import sys\n"
        "from torch_memory_saver import torch_memory_saver\n"
        "from sglang.srt.debug_utils import dumper\n"
        "print(dumper._MegatronPlugin._available, torch_memory_saver._impl_ctor_kwargs)\n"
    )
    words = [sys.executable, "-W", "ignore", "-c", program]
    found = subprocess.run(words, env=dict(os.environ) | environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "False {}"
