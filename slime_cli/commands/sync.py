"""``slime sync``: versions into an endpoint's engines, proven to be there; and back."""

import argparse
import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from slime_cli import disk, locks
from slime_cli.errors import DataError, UsageError
from slime_cli.manifests import checkpoints, layout
from slime_cli.manifests.proof import SHOWN, Proof

if TYPE_CHECKING:
    from slime_cli.serving.attached import Attached
    from slime_cli.weights.folder import Folder
    from slime_cli.weights.pushing import Pushing

Say = Callable[[str], None]
_NAME = re.compile(r"(?!(?:hf|applied)$)\w[\w.-]*")
"""The form of a version's name. A checkpoint's weights lie in ``hf`` before they are published, the copy that deltas
are applied to in ``applied``."""
VERBS = {
    "push": "a checkpoint or version into the engines; undone if it fails",
    "publish": "a checkpoint as a version in --publish DIR; no engine is asked",
    "verify": "compare the engines with the version they name, or --load",
    "rollback": "the version that was there before the last push",
    "list": "versions beside the endpoint, and what each engine holds",
}
_NEEDS = {"push": ("load", "rollout_endpoint"), "publish": ("load", "publish")}
_READS = {
    "push": {"load", "rollout_endpoint", "ckpt_step", "publish", "weight_version"},
    "publish": {"load", "ckpt_step", "publish", "weight_version"},
    "verify": {"load", "rollout_endpoint"},
    "rollback": {"rollout_endpoint"},
    "list": {"rollout_endpoint", "publish"},
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "see `slime sync --help`")


def _parsed(argv: list[str]) -> argparse.Namespace:
    verbs = "\n".join(f"  {verb:9} {text}" for verb, text in VERBS.items())
    parser = _Parser(
        prog="slime sync",
        description=f"{str(__doc__).replace('``', '')}\n\n{verbs}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verb", nargs="?", default="push", choices=[*VERBS], metavar="VERB", help="push if left out")
    parser.add_argument("--load", metavar="DIR", help="a torch_dist or HF checkpoint, or a published weights/vNNNNNN")
    parser.add_argument("--rollout-endpoint", metavar="FILE", help="endpoint.json that serve-rollout wrote")
    parser.add_argument(
        "--ckpt-step", type=int, metavar="N", help="step of the checkpoint in --load (default: the newest whole one)"
    )
    parser.add_argument(
        "--publish", metavar="DIR", help="where versions are written (default: weights/ beside endpoint.json)"
    )
    parser.add_argument(
        "--weight-version", metavar="NAME", help="name that engines report (default: from the checkpoint's step)"
    )
    args = parser.parse_args(argv)
    given = {name for name, value in vars(args).items() if value is not None} - {"verb"}
    for name in sorted(given - _READS[args.verb]):
        parser.error(f"slime sync {args.verb} does not read {_flag(name)}")
    needed = _NEEDS.get(args.verb, ("rollout_endpoint",) if args.verb != "list" or not args.publish else ())
    if lacking := [_flag(name) for name in needed if name not in given]:
        parser.error(f"slime sync {args.verb} needs {' and '.join(lacking)}")
    if args.weight_version is not None and not _NAME.fullmatch(args.weight_version):
        fix = "letters, digits, hyphens and dots, and a letter or a digit first: it is the name of a folder too"
        raise UsageError(f"--weight-version {args.weight_version!r} cannot be a name", fix)
    return args


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(argv: list[str]) -> int:
    """Returns the exit code; raises EngineError when an engine holds other weights afterwards."""
    args = _parsed(argv)

    from slime_cli.screen import Screen

    commands = {"push": _push, "publish": _publish_only, "verify": _verify, "rollback": _rollback, "list": _list}
    commands[args.verb](args, Screen().say)
    return 0


def _push(args: argparse.Namespace, say: Say) -> None:
    from slime_cli.weights import matching

    attached = _attached(args)
    with contextlib.closing(attached.claim(f"slime sync --load {args.load}", say)):
        pushing = _pushing(args, attached, say)

        def check(model: pathlib.Path) -> None:
            matching.require(str(model), attached.endpoint, pushing.urls, None, say, quantises=True)

        _say_proofs(pushing.push(_published(args, say, check, attached.endpoint.model)), say)


def _publish_only(args: argparse.Namespace, say: Say) -> None:
    version = _published(args, say, lambda model: None)
    say(f"{version.name}: {len(version.manifest.tensors)} tensors in {version.path}")


def _verify(args: argparse.Namespace, say: Say) -> None:
    from slime_cli.weights.folder import if_whole

    pushing = _pushing(args, _attached(args), say)
    version = if_whole(pathlib.Path(args.load)) if args.load else pushing.held()
    if version is None:
        raise UsageError(f"--load {args.load} is no published version", "slime sync publish makes one")
    _say_proofs(pushing.verify(version), say)


def _rollback(args: argparse.Namespace, say: Say) -> None:
    attached = _attached(args)
    with contextlib.closing(attached.claim("slime sync rollback", say)):
        _say_proofs(_pushing(args, attached, say).rollback(), say)


def _list(args: argparse.Namespace, say: Say) -> None:
    from slime_cli.weights import applying
    from slime_cli.weights.folder import if_whole

    root = _root(args)
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.name not in (layout.APPLIED, "hf") and path.is_dir() and not path.name.startswith("."):
            if (version := if_whole(path)) is None:
                say(f"{path.name}: not whole, nothing takes it for a version")
                continue
            size = sum(file.stat().st_size for file in path.iterdir())
            base = f", {version.manifest.encoding} of {version.manifest.base}" if version.manifest.base else ""
            lost = "" if applying.is_whole(version) else ", and what it needs is not there"
            say(f"{path.name}: step {version.manifest.training_step}, {size / 1e6:,.1f} MB{base}{lost}")
    if args.rollout_endpoint:
        for url, name in _pushing(args, _attached(args), say).names().items():
            say(f"{url} holds {name}")


def _attached(args: argparse.Namespace) -> "Attached":
    from slime_cli.serving.attached import Attached

    attached = Attached(args.rollout_endpoint)
    attached.check()
    return attached


def _pushing(args: argparse.Namespace, attached: "Attached", say: Say) -> "Pushing":
    from slime_cli.weights.pushing import Pushing

    record = pathlib.Path(args.rollout_endpoint).parent / layout.SYNCED
    return Pushing(record, attached.endpoint, attached.alive(), say)


def _root(args: argparse.Namespace) -> pathlib.Path:
    return pathlib.Path(args.publish or pathlib.Path(args.rollout_endpoint).parent / layout.WEIGHTS)


def _say_proofs(proofs: Sequence[Proof], say: Say) -> None:
    for proof in proofs:
        say(f"{proof.url} verified at {proof.version}: {proof.tensors} tensors, {SHOWN[proof.kind]}")


def _published(
    args: argparse.Namespace, say: Say, check: Callable[[pathlib.Path], None], served: str | None = None
) -> "Folder":
    """The version that --load is, or one made from the checkpoint there. ``check`` refuses a model. ``served``: the
    folder of the engines' model, in whose format the version is, where that is quantised and the weights are not."""
    from slime_cli.models import architecture, schemes, whole
    from slime_cli.weights import applying
    from slime_cli.weights.folder import if_whole, opened

    source = pathlib.Path(args.load)
    if not source.exists():
        raise DataError(f"--load {source}: no such folder", "point at a checkpoint or a published version")
    is_checkpoint = checkpoints.any_in(source) and not (source / "config.json").is_file()
    if args.ckpt_step is not None and not is_checkpoint:
        raise UsageError(
            f"--ckpt-step {args.ckpt_step}: --load {source} holds no torch_dist checkpoints", "leave it out"
        )
    if version := if_whole(source, args.weight_version):
        if version.manifest.encoding == "adapter":
            raise DataError(
                f"--load {source}: a LoRA adapter alone, and `slime sync` sends whole weights",
                "give the run's checkpoint, whose adapter is merged into its base",
            )
        check(applying.chain(version)[0].path)  # a delta has no config
        return version
    root = _root(args)
    hf, step = _converted(args, source, root, say) if is_checkpoint else (source, 0)
    if not (hf / "config.json").exists():
        raise UsageError(f"--load {source}: neither a torch_dist nor an HF checkpoint", "slime convert makes either")
    whole.check(hf, say)
    check(hf)
    name = args.weight_version or layout.version_name(step)
    if hf.resolve().is_relative_to((root / name).resolve()):
        raise UsageError(
            f"--publish {root}: {root / name} holds the weights that are to be published", "give another folder"
        )
    disk.writable(root, "--publish")
    if schemes.settings(architecture.read_config(str(hf))):
        served = None
    form = schemes.of_config(architecture.read_config(served)) if served else None
    say(f"publishing {source} as {name}" + (f", {form.words} as {served}" if form else ""))
    with _alone(root):
        _publish(hf, root / name, step, source, served if form else None)
    return opened(root / name)


@contextlib.contextmanager
def _alone(root: pathlib.Path) -> Iterator[None]:
    """One process at a time writes versions there."""
    try:
        lock = locks.take(root / layout.LOCK)
    except locks.TakenError:
        fix = "wait until it ends, or give another --publish"
        raise UsageError(f"another slime sync writes into {root}", fix) from None
    try:
        yield
    finally:
        os.close(lock)


def _converted(
    args: argparse.Namespace, source: pathlib.Path, root: pathlib.Path, say: Say
) -> tuple[pathlib.Path, int]:
    """A torch_dist checkpoint as a folder in HF format, and its step."""
    from slime_cli import installed
    from slime_cli.cluster import conversion
    from slime_cli.convert import convert

    installed.require(*installed.TRAINING)
    disk.writable(root, "--publish")
    newest = checkpoints.complete(source, say, args.ckpt_step)
    return convert.as_hf(newest, root / "hf", say=say, run=conversion.run)


def _publish(hf: pathlib.Path, target: pathlib.Path, step: int, source: pathlib.Path, served: str | None) -> None:
    """The weights of an HF folder as a version, a tensor at a time; what was there stays until it is whole.
    ``served``: a quantised model in whose format they are written."""
    from safetensors import safe_open

    from slime_cli.models import headers
    from slime_cli.weights import publish, quantised
    from slime_cli.weights.folder import remove

    def tensors() -> Iterator[tuple[str, Any]]:
        for file in headers.read(hf).files:
            with safe_open(hf / file, framework="pt") as content:
                for name in content.keys():
                    yield name, content.get_tensor(name)

    new = target.with_name(f".{target.name}")
    with disk.naming(target):
        form = quantised.publishing(served) if served else None
        named = form.through(tensors()) if form else tensors()
        publish.write(named, new, hf_checkpoint=served or str(hf), version=target.name, step=step, run=str(source))
        if target.exists():
            remove(target)
        new.rename(target)
