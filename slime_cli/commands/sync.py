"""``slime sync``: a checkpoint's weights, published as a version, into the engines of an endpoint, proven to be
there."""

import argparse
import contextlib
import pathlib
import re
from collections.abc import Callable
from typing import NoReturn

from slime_cli import disk, manifests
from slime_cli.errors import DataError, UsageError
from slime_cli.manifests import checkpoints
from slime_cli.manifests.proof import SHOWN

_NAME = re.compile(r"(?!hf$)\w[\w.-]*")
"""What a version may be called. A checkpoint's weights lie in ``hf`` before they are published."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "see `slime sync --help`")


def run(argv: list[str]) -> int:
    """Returns the exit code; raises EngineError when an engine holds other weights afterwards."""
    parser = _Parser(prog="slime sync", description=__doc__.replace("``", ""), allow_abbrev=False)
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

    from slime_cli.screen import Screen
    from slime_cli.serving.attached import Attached
    from slime_cli.weights import matching, sync

    screen = Screen()
    attached = Attached(args.rollout_endpoint)
    attached.check()
    with contextlib.closing(attached.claim(f"slime sync --load {args.load}", screen.say)):
        urls = attached.alive()

        def check(model: pathlib.Path) -> None:
            matching.require(str(model), attached.endpoint, urls, None, screen.say)

        folder, version = _published(args, screen, check)
        screen.say(f"{len(urls)} engine(s) load {version}")
        sync.load(urls, folder, version)
        proofs = sync.verify(urls, folder, version)
    for proof in proofs:
        screen.say(f"{proof.url} verified at {proof.version}: {proof.tensors} tensors, {SHOWN[proof.kind]}")
    return 0


def _published(args, screen, check: Callable[[pathlib.Path], None]) -> tuple[pathlib.Path, str]:
    """The folder of a published version, made from the checkpoint where it is none yet. ``check`` refuses a model."""
    source = pathlib.Path(args.load)
    if not source.exists():
        raise DataError(f"--load {source}: no such folder", "point at a checkpoint or a published version")
    is_checkpoint = (source / "checkpoint.json").exists() or any(source.glob("iter_*"))
    if args.ckpt_step is not None and not is_checkpoint:
        raise UsageError(
            f"--ckpt-step {args.ckpt_step}: --load {source} holds no torch_dist checkpoints", "leave it out"
        )
    if (source / "manifest.json").exists():
        check(source)
        return source, args.weight_version or manifests.read(source / "manifest.json", manifests.Weights).version
    root = pathlib.Path(args.publish or pathlib.Path(args.rollout_endpoint).parent / "weights")
    hf = source
    step = 0
    if is_checkpoint:
        from slime_cli import installed
        from slime_cli.cluster import conversion
        from slime_cli.convert import convert

        installed.require(*installed.TRAINING)
        disk.writable(root, "--publish")
        newest = checkpoints.complete(source, screen.say, args.ckpt_step)
        hf, step = convert.as_hf(newest, root / "hf", say=screen.say, run=conversion.run)
    elif not (source / "config.json").exists():
        raise UsageError(f"--load {source}: neither a torch_dist nor an HF checkpoint", "slime convert makes either")
    from safetensors import safe_open

    from slime_cli.models import headers, whole
    from slime_cli.weights import publish

    version = args.weight_version or f"v{step:06d}"
    whole.check(hf, screen.say)
    check(hf)

    def tensors():
        for file in headers.read(hf).files:
            with safe_open(hf / file, framework="pt") as content:
                for name in content.keys():
                    yield name, content.get_tensor(name)

    target = root / version
    if hf.resolve().is_relative_to(target.resolve()):
        raise UsageError(
            f"--publish {root}: {target} holds the weights that are to be published", "give another folder"
        )
    disk.writable(root, "--publish")
    screen.say(f"publishing {source} as {version}")
    with disk.naming(target):
        publish.write(tensors(), target, hf_checkpoint=str(hf), version=version, step=step, run=str(source))
    return target, version
