"""``slime sync``: a checkpoint's weights, published as a version, into the engines of an endpoint, proven to be
there."""

import argparse
import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from slime_cli import disk
from slime_cli.errors import DataError, UsageError
from slime_cli.manifests import checkpoints, layout
from slime_cli.manifests.proof import SHOWN

if TYPE_CHECKING:
    from slime_cli.weights.folder import Folder

Say = Callable[[str], None]
_NAME = re.compile(r"(?!hf$)\w[\w.-]*")
"""What a version may be called. A checkpoint's weights lie in ``hf`` before they are published."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "see `slime sync --help`")


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="slime sync", description=str(__doc__).replace("``", ""), allow_abbrev=False)
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="a torch_dist or HF checkpoint, or a published weights/vNNNNNN"
    )
    parser.add_argument(
        "--rollout-endpoint", required=True, metavar="FILE", help="endpoint.json that serve-rollout wrote"
    )
    parser.add_argument(
        "--ckpt-step", type=int, metavar="N", help="step of the checkpoint in --load (default: the newest whole one)"
    )
    parser.add_argument(
        "--publish", metavar="DIR", help="where the version is written (default: weights/ beside endpoint.json)"
    )
    parser.add_argument(
        "--weight-version", metavar="NAME", help="name that engines report (default: from the checkpoint's step)"
    )
    args = parser.parse_args(argv)
    if args.weight_version is not None and not _NAME.fullmatch(args.weight_version):
        fix = "letters, digits, hyphens and dots, and a letter or a digit first: it is the name of a folder too"
        raise UsageError(f"--weight-version {args.weight_version!r} cannot be a name", fix)
    return args


def run(argv: list[str]) -> int:
    """Returns the exit code; raises EngineError when an engine holds other weights afterwards."""
    args = _parsed(argv)

    from slime_cli.screen import Screen
    from slime_cli.serving.attached import Attached
    from slime_cli.weights import matching, verification
    from slime_cli.weights.transports.disk import load

    screen = Screen()
    attached = Attached(args.rollout_endpoint)
    attached.check()
    with contextlib.closing(attached.claim(f"slime sync --load {args.load}", screen.say)):
        urls = attached.alive()

        def check(model: pathlib.Path) -> None:
            matching.require(str(model), attached.endpoint, urls, None, screen.say)

        version = _published(args, screen.say, check)
        screen.say(f"{len(urls)} engine(s) load {version.name}")
        load(version, urls, flush=True)
        proofs = verification.verify(version, urls)
    for proof in proofs:
        screen.say(f"{proof.url} verified at {proof.version}: {proof.tensors} tensors, {SHOWN[proof.kind]}")
    return 0


def _published(args: argparse.Namespace, say: Say, check: Callable[[pathlib.Path], None]) -> "Folder":
    """The version that --load is, or one made from the checkpoint there. ``check`` refuses a model."""
    from slime_cli.models import whole
    from slime_cli.weights.folder import opened

    source = pathlib.Path(args.load)
    if not source.exists():
        raise DataError(f"--load {source}: no such folder", "point at a checkpoint or a published version")
    is_checkpoint = checkpoints.any_in(source)
    if args.ckpt_step is not None and not is_checkpoint:
        raise UsageError(
            f"--ckpt-step {args.ckpt_step}: --load {source} holds no torch_dist checkpoints", "leave it out"
        )
    if (source / layout.MANIFEST).exists():
        check(source)
        return opened(source, args.weight_version)
    root = pathlib.Path(args.publish or pathlib.Path(args.rollout_endpoint).parent / layout.WEIGHTS)
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
    say(f"publishing {source} as {name}")
    _publish(hf, root / name, step, source)
    return opened(root / name)


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


def _publish(hf: pathlib.Path, target: pathlib.Path, step: int, source: pathlib.Path) -> None:
    """The weights of an HF folder as a version, a tensor at a time."""
    from safetensors import safe_open

    from slime_cli.models import headers
    from slime_cli.weights import publish

    def tensors() -> Iterator[tuple[str, Any]]:
        for file in headers.read(hf).files:
            with safe_open(hf / file, framework="pt") as content:
                for name in content.keys():
                    yield name, content.get_tensor(name)

    with disk.naming(target):
        publish.write(tensors(), target, hf_checkpoint=str(hf), version=target.name, step=step, run=str(source))
