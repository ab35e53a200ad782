"""Native options that slime's code sets: whatever a user could give in vain is refused.

Each test walks all that slime sets in one way, so that a new one is either refused to users or said here not to need
it.
1. Attributes of Megatron's arguments, assigned after its parser.
2. Constants passed to Megatron's functions and classes in an option's place.
3. The words that every trainer begins with: a user's value comes later, a flag cannot be taken back.
4. The words that every engine and the router are started with.
"""

import ast
import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from slime_cli.commands import preflight
from slime_cli.errors import UsageError
from slime_cli.hardware import transformer_engine
from slime_cli.hardware.device import Device
from slime_cli.options import catalogue, managed, own
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved, resolve
from slime_cli.serving import engine, fleet
from slime_cli.training.network import megatron

PACKAGE = pathlib.Path(own.__file__).parents[1]
STILL_A_USERS = {
    "async_save": "put back as it was given: Megatron turns it off",
    "check_for_nan_in_loss_and_grad": "turned off by --on-nan-gradient skip, and its flag does nothing but turn it off",
    "mtp_num_layers": "taken back without --enable-mtp-training, which a warning says, and of a critic",
    "dist_ckpt_optim_fully_reshardable": "turned off by --use-stateless-adam, which a warning says",
}
"""Dest that code assigns -> why a user may give it."""


def trees() -> Iterator[tuple[pathlib.Path, ast.Module]]:
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "options" not in path.parents:
            yield path, ast.parse(path.read_text())


def assigned(tree: ast.AST) -> Iterator[str]:
    """Attributes that are set of something called ``args``: args.x = ..., self.args.x = ..., setattr(args,
    "x", ...)."""
    for node in ast.walk(tree):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            parts = [part for target in targets for part in ast.walk(target)]
            yield from (part.attr for part in parts if isinstance(part, ast.Attribute) and is_args(part.value))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and is_args(node.args[0]):
            assert isinstance(node.args[1], ast.Constant), f"line {node.lineno}: which of Megatron's arguments is set?"
            yield node.args[1].value


def is_args(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name == "args" or name.endswith("_args")


def of_megatron(dest: str) -> bool:
    """A user could give it."""
    return dest in catalogue.load("megatron").by_dest and dest not in {
        catalogue.load("megatron").by_flag[flag].dest for flag in own.OWN_OVER_MEGATRON
    }


def test_what_code_assigns_of_megatrons_arguments_is_refused_or_still_a_users():
    found = {dest for _, tree in trees() for dest in assigned(tree) if of_megatron(dest)}
    assert {"finetune", "padded_vocab_size", "async_save"} <= found, "the walk finds what is known to be there"
    lost = sorted(dest for dest in found if not managed.refusal("megatron", dest) and dest not in STILL_A_USERS)
    assert not lost, f"refuse them (options/managed.py), or say in STILL_A_USERS why a user may give them: {lost}"
    assert STILL_A_USERS.keys() <= found


def test_the_walk_sees_every_way_to_assign():
    code = "args.a = args.b = 1\nself.args.c, x = 1, 2\nargs.d += 1\nsetattr(args, 'e', 1)\nother.f = args.g\n"
    assert sorted(assigned(ast.parse(code))) == ["a", "b", "c", "d", "e"]
    with pytest.raises(AssertionError, match="which of Megatron"):
        list(assigned(ast.parse("setattr(args, name, 1)")))


def constants(tree: ast.Module) -> Iterator[str]:
    """Keywords that get a constant in a call of something imported from Megatron."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {name.asname or name.name for node in imports for name in node.names if is_megatron(node.module)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        root = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        if getattr(root, "id", "") in names:
            yield from (word.arg for word in call.keywords if isinstance(word.value, ast.Constant) and word.arg)


def is_megatron(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "megatron"


def test_what_code_passes_in_an_options_place_is_refused():
    found = {dest for _, tree in trees() for dest in constants(tree) if of_megatron(dest)}
    assert "fp16_lm_cross_entropy" in found, "the walk finds what is known to be there"
    assert sorted(dest for dest in found if not managed.refusal("megatron", dest)) == []


OF_THE_MACHINE = {
    "masked_softmax_fusion": "it is Transformer Engine's or Apex's, which is not there",
    "no_persist_layer_norm": "the same",
    "gradient_accumulation_fusion": "there is no GPU",
    "bias_swiglu_fusion": "the same",
    "use_cpu_initialization": "the same",
    "bf16": "a GPU's trainer computes in it: preflight refuses --bf16=false",
}
"""Flags that slime gives on some machines alone -> why taking them back is not refused everywhere."""


def flags_of(argv: list[str]) -> set[str]:
    table = catalogue.load("megatron").by_flag
    return {table[word].dest for word in argv if word in table and not table[word].takes_value}


def test_flags_of_every_trainer_cannot_be_taken_back(monkeypatch):
    cpu, gpu = Device("cpu", 1, "c"), Device("cuda", 1, "g")
    each = [flags_of(megatron.always(device)) for device in (cpu, gpu)]
    monkeypatch.setattr(transformer_engine, "problem", lambda kind: None)
    each.append(flags_of(megatron.always(gpu)))
    assert set.intersection(*each) == managed.GIVEN["megatron"]
    assert set.union(*each) - managed.GIVEN["megatron"] == OF_THE_MACHINE.keys()


def test_values_of_every_trainer_come_before_a_users():
    given = ["--lr-decay-style", "cosine", "--fp16"]
    always = megatron.always(Device("cuda", 1, "g"), given)
    assert "--lr-decay-style" in always and "--bf16" not in always, "Megatron refuses the two together"
    assert "--bf16" in megatron.always(Device("cuda", 1, "g"))
    source = (PACKAGE / "cluster" / "trainer_actor.py").read_text()
    assert "megatron.parse(megatron.always(self.device, given) + given," in source


def test_a_flag_that_stays_given_is_not_taken_back_silently(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="--no-rope-fusion=false takes nothing back: slime gives this flag itself"):
        resolve(["--no-rope-fusion=false"])
    (tmp_path / "mine.yaml").write_text("megatron: {no-rope-fusion: false}")
    with pytest.raises(UsageError, match="megatron.no-rope-fusion: false takes nothing back"):
        resolve([], [str(tmp_path / "mine.yaml")])
    resolve(["--no-rope-fusion"])
    monkeypatch.setattr("slime_cli.hardware.device.find", lambda: Device("cuda", 1, "g"))
    words = "--hf-checkpoint h --loss-type sft_loss"
    with pytest.raises(UsageError, match="--bf16=false: a GPU's trainer computes in bfloat16"):
        preflight._machine(resolve(f"{words} --bf16=false".split()), {}, None)
    preflight._machine(resolve(f"{words} --bf16=false --fp16".split()), {}, None)


@pytest.fixture
def started(monkeypatch):
    """Command lines of the servers that are started: name -> words."""
    found = {}
    monkeypatch.setattr(engine, "Server", lambda name, argv, environment, log: found.setdefault(name, argv))
    return found


def words_of(section: str, argv: list[str]) -> list[str]:
    table = catalogue.load(section).by_flag
    return [table[word.partition("=")[0]].dest for word in argv if word.partition("=")[0] in table]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_an_engine_is_started_with_besides_a_users_words_is_refused(started, monkeypatch, tmp_path, kind):
    monkeypatch.setattr("slime_cli.hardware.device.find", lambda: Device(kind, 1, "d"))
    monkeypatch.setattr(engine.processes, "python", lambda module, *words: list(words))
    spec = engine.EngineSpec("model", (), 1, 0, 7, str(tmp_path / "log"))
    engine.Engine(spec)
    found = words_of("sglang", started["engine"])
    assert "model_path" in found and ("base_gpu_id" in found) == (kind == "cuda")
    assert [dest for dest in found if not managed.refusal("sglang", dest)] == []


def merged(words: str, tmp_path: pathlib.Path) -> list[str]:
    (tmp_path / "config.json").write_text("{}")
    return engine.engine_argv(resolve(words.split(), [], "serve-rollout"), str(tmp_path))


def test_what_a_device_wants_of_an_engine_gives_way_to_a_user(monkeypatch, tmp_path):
    defaults = {"disable_overlap_schedule": True, "max_total_tokens": 65536}
    monkeypatch.setattr("slime_cli.hardware.device.engine_defaults", lambda: defaults)
    plain = merged("", tmp_path)
    assert "--disable-overlap-schedule" in plain and "65536" in plain
    changed = merged("--sglang-disable-overlap-schedule=false --sglang-max-total-tokens 9", tmp_path)
    assert "--disable-overlap-schedule" not in changed and "65536" not in changed and "9" in changed


DRAFTS = "--sglang-speculative-algorithm EAGLE"


def test_a_model_drafts_with_its_own_layers_where_it_has_some(tmp_path):
    with pytest.raises(UsageError, match="no layers of multi-token prediction"):
        merged(DRAFTS, tmp_path)
    named = merged(f"{DRAFTS} --sglang-speculative-draft-model-path other", tmp_path)
    assert named[named.index("--speculative-draft-model-path") + 1] == "other"
    (tmp_path / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    own = engine.engine_argv(resolve(DRAFTS.split(), [], "serve-rollout"), str(tmp_path))
    assert own[own.index("--speculative-draft-model-path") + 1] == str(tmp_path)
    assert "--speculative-draft-model-path" not in merged("--sglang-speculative-algorithm NGRAM", tmp_path)


def router_of(started: dict, monkeypatch, tmp_path: pathlib.Path, words: str) -> list[str]:
    (tmp_path / "config.json").write_text("{}")
    started.clear()
    monkeypatch.setattr(engine.processes, "python", lambda module, *words: list(words))
    resolved: Resolved = resolve(words.split(), [], "serve-rollout")
    resolved = dataclasses.replace(resolved, slime=SlimeOptions(rollout_num_gpus=1))
    with contextlib.suppress(StopIteration):
        fleet.Fleet(resolved, str(tmp_path), tmp_path, _no_engine, print)
    return started["router"]


def _no_engine(spec: engine.EngineSpec) -> None:
    raise StopIteration


def test_what_the_router_is_started_with_is_refused_or_comes_before_a_users_words(started, monkeypatch, tmp_path):
    monkeypatch.setattr(fleet.Fleet, "stop", lambda self: None)
    alone = words_of("router", router_of(started, monkeypatch, tmp_path, ""))
    ours = {dest for dest in alone if dest not in own.NATIVE_DEFAULTS["router"]}
    assert {"host", "port", "disable_circuit_breaker"} <= ours
    for dest in sorted(ours):
        if managed.refusal("router", dest):
            continue
        option = catalogue.load("router").by_dest[dest][0]
        value = " 3" if option.takes_value else "=false"
        argv = router_of(started, monkeypatch, tmp_path, f"--router-{option.flag[2:]}{value}")
        last = [place for place, word in enumerate(argv) if word == option.flag][-1:]
        assert [argv[place + 1] for place in last] == ["3"] * option.takes_value, dest
