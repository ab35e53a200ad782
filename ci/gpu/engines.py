"""How generation speeds up with the number of engines behind one router.

``python -m ci.gpu.engines FOLDER [--devices N] [--seconds 200] [--small]`` (a new folder) starts ``slime
serve-rollout`` with 1, 2, 4 ... N engines of one device, one after the other, and asks each fleet for the same number
of answers an engine, straight at the router. Prints JSON lines: ``scaling`` (tokens a second, and over that of one
engine times their number). What there is no time for is said. ``--small`` is for trying it out, on a CPU as well.
"""

import argparse
import json
import pathlib
import random
import sys
import time

from bench.syncs import serving
from ci.gpu import common, shapes

MODEL = shapes.tiny(shapes.QWEN3_4B)
SMALL = "tiny:qwen3?num_hidden_layers=2&hidden_size=64&intermediate_size=128&head_dim=16"
REQUESTS, LENGTH = 256, 512
"""An engine's."""


def fleet(folder: pathlib.Path, engines: int, small: bool) -> float:
    """Tokens a second of so many engines."""
    folder.mkdir(parents=True, exist_ok=True)
    requests, length, vocabulary = (8, 16, 300) if small else (REQUESTS, LENGTH, 150_000)
    draw = random.Random(0)
    prompts = [[draw.randrange(100, vocabulary) for _ in range(40)] for _ in range(requests * engines)]
    words = ["--rollout-num-gpus", str(engines), "--router-policy", "round_robin"]
    with serving(folder, SMALL if small else MODEL, words):
        url = json.loads((folder / "serve" / "endpoint.json").read_text())["router_url"]
        common.straight(url, prompts, 8)  # the first requests compile kernels
        return common.straight(url, prompts, length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--devices", type=int, help="at most so many engines; as many as there are GPUs")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--small", action="store_true", help="a small model and few requests")
    args = parser.parse_args()
    started = time.monotonic()
    most = args.devices or common.gpus() or 2
    one = 0.0
    longest = 0.0
    for engines in (n for n in (1, 2, 4, 8) if n <= most):
        begun = time.monotonic()
        if begun - started + 1.2 * longest > args.seconds:
            common.say("scaling", engines=engines, left_out="no time")
            continue
        speed = fleet(args.folder.resolve() / str(engines), engines, args.small)
        one = one or speed
        longest = time.monotonic() - begun
        common.say("scaling", engines=engines, tokens_per_s=speed, share=speed / (one * engines), seconds=longest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
