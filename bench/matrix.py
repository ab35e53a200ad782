"""The quickstart with every advantage estimator: does the held-out reward improve? ``make matrix``, half an hour on 2
cores.

Each run is the command that a user would type, in a run directory of its own under ``runs/matrix``; one that was
interrupted is resumed and one that is finished is not run again. Writes ``runs/matrix.json``.
"""

import json
import pathlib
import subprocess
import sys

from slime_cli import manifests
from slime_cli.options.estimators import ESTIMATORS

ROOT = pathlib.Path("runs/matrix")


def main() -> None:
    rows = []
    for estimator in sys.argv[1:] or ESTIMATORS:
        folder = ROOT / estimator
        print(f"-- {estimator}", flush=True)
        if not (folder / "summary.json").exists():
            command = [
                sys.executable,
                "-m",
                "slime_cli",
                "train",
                "--profile",
                "quickstart",
                "--advantage-estimator",
                estimator,
            ]
            subprocess.run([*command, "--run-dir", str(folder)], check=True, stdin=subprocess.DEVNULL)
        found = json.loads((folder / "summary.json").read_text())
        rows.append(
            {"estimator": estimator} | {key: found[key] for key in ("reward_before", "reward_after", "seconds")}
        )
        manifests.write_json("runs/matrix.json", rows)
    for row in rows:
        print("{estimator:30} {reward_before:.3f} -> {reward_after:.3f}  {seconds:.0f} s".format(**row))
    if any(row["reward_after"] <= row["reward_before"] for row in rows):
        sys.exit("an estimator did not improve the reward")


if __name__ == "__main__":
    main()
