"""Plots the logs of a training, one run after another: `python -m benchmarks.tiny.plot`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.tiny.logs import read_logs

RESULTS = Path(__file__).parents[1] / "results"
LOGS = (RESULTS / "tiny-training.jsonl", RESULTS / "tiny-touch-up.jsonl")


def plot(logs: Sequence[Path], image: Path) -> None:
    """Losses above, accuracies and covered attention mass below, over training time; phases as bands."""
    lines = read_logs(logs)
    seconds = [line["seconds"] for line in lines]
    figure, (losses, shares) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    losses.plot(seconds, [line["next_token"] for line in lines], label="next token")
    for step in range(len(lines[0]["mtp"])):
        losses.plot(seconds, [line["mtp"][step] for line in lines], label=f"MTP step {step + 1}", lw=0.8)
    losses.plot(seconds, [line["indexer"] for line in lines], label="indexer KL", lw=0.8)
    losses.set(yscale="log", ylabel="loss (nats)")
    shares.plot(seconds, [line["answers"] for line in lines], label="answer tokens right")
    shares.plot(seconds, [line["recall"] for line in lines], label="recalled digits right")
    shares.plot(
        seconds, [min(line["covered"]) for line in lines], label="attention mass selected, least layer"
    )
    shares.set(ylabel="share", xlabel="training time (s)", ylim=(0, 1.02))
    for start, label in _phases(lines):
        for axes in (losses, shares):
            axes.axvline(start, color="grey", lw=0.6)
        losses.annotate(label, (start, 1.02), xycoords=("data", "axes fraction"), rotation=25)
    losses.legend(loc="upper right")
    shares.legend(loc="lower right")
    figure.savefig(image, dpi=110)


def _phases(lines: Sequence[dict[str, Any]]) -> list[tuple[float, str]]:
    """Start and name of each phase; phases too short for a label of their own share one."""
    marks: list[tuple[float, str]] = []
    previous = None
    for line in lines:
        kind = f"{line['length']}{', sparse' if line['sparse'] else ''}{', touch-up' * bool(line['run'])}"
        if kind != previous and marks and line["seconds"] - marks[-1][0] < 0.06 * lines[-1]["seconds"]:
            marks[-1] = (marks[-1][0], f"{marks[-1][1]} | {kind}")
        elif kind != previous:
            marks.append((line["seconds"], kind))
        previous = kind
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", nargs="+", type=Path, default=LOGS, help="of one run and its continuations")
    parser.add_argument("--image", type=Path, default=RESULTS / "tiny-training.png")
    args = parser.parse_args()
    plot(args.logs, args.image)


if __name__ == "__main__":
    main()
