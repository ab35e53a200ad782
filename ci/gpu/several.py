"""All that several GPUs of one host are asked, in one call inside ten minutes.

``python -m ci.gpu.several FOLDER [--devices N] [--seconds 570] [--small]`` (a new folder) runs the checks of this
folder that need more than one GPU, one after the other, each with the time that is left for it: ``layouts`` (right and
fast), ``engines`` (scaling), ``loops`` (colocated and disaggregated, syncs to an engine of N ranks). Their lines are
its lines; a check that runs out of time is ended and said. Ends with exit code 1 where one of them did or was ended.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import time

from ci.gpu import common

SHARES = {"layouts": 0.45, "engines": 0.25, "loops": 0.3}
"""The share of the time that each check has; the time that one leaves goes to the next ones."""
GRACE = 15.0
"""Seconds that a check has to end in order; within its share."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--devices", type=int, help="2, 4 or 8; as many as there are GPUs")
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--small", action="store_true", help="for trying it out, on a CPU as well")
    args = parser.parse_args()
    devices = args.devices or common.gpus() or 2
    end = time.monotonic() + args.seconds
    codes = {}
    for name in SHARES:
        behind = sum(SHARES[other] for other in SHARES if other not in codes)
        limit = (end - time.monotonic()) * SHARES[name] / behind
        command = [sys.executable, "-m", f"ci.gpu.{name}", str(args.folder / name)]
        command += ["--ranks" if name == "layouts" else "--devices", str(devices)]
        command += [] if name == "loops" else ["--seconds", str(int(limit - GRACE - 10))]
        codes[name] = ended(command + ["--small"] * args.small, limit - GRACE)
    common.say("several", devices=devices, exit_codes=codes)
    return 0 if not any(codes.values()) else 1


def ended(command: list[str], limit: float) -> int:
    """The command's exit code; 124 where its time was up. None of its processes is left."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Its whole session: asked to end, which runs do in order, and killed where that takes long."""
    for seconds, how in ((GRACE, signal.SIGTERM), (1.0, signal.SIGKILL)):
        deadline = time.monotonic() + seconds
        try:
            os.killpg(process.pid, how)
            while time.monotonic() < deadline:
                process.poll()  # it stays a member of its group until it is waited for
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            return


if __name__ == "__main__":
    sys.exit(main())
