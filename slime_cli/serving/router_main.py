"""The stock router by its own argument parser, without the import of all of sglang that its launcher makes for a part
not used.

``python -m slime_cli.serving.router_main`` takes exactly what ``python -m sglang_router.launch_router`` takes.
"""

import argparse
import sys

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="sglang-router", allow_abbrev=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    args = RouterArgs.from_cli_args(parser.parse_args(argv), use_router_prefix=False)
    Router.from_args(args).start()


if __name__ == "__main__":
    main(sys.argv[1:])
