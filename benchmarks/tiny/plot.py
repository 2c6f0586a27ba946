"""Plots a training log: `python -m benchmarks.tiny.plot --log benchmarks/results/tiny-training.jsonl`."""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[1] / "results"


def plot(log: Path, image: Path) -> None:
    """Losses above, accuracies and covered attention mass below, over training time; phases as bands."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
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
    previous = None
    for line in lines:
        kind = f"{line['length']}{', sparse' if line['sparse'] else ''}"
        if kind != previous:
            for axes in (losses, shares):
                axes.axvline(line["seconds"], color="grey", lw=0.6)
            losses.annotate(kind, (line["seconds"], 1.01), xycoords=("data", "axes fraction"), rotation=30)
            previous = kind
    for axes in (losses, shares):
        axes.legend()
    figure.savefig(image, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, default=RESULTS / "tiny-training.jsonl")
    parser.add_argument("--image", type=Path, default=RESULTS / "tiny-training.png")
    args = parser.parse_args()
    plot(args.log, args.image)


if __name__ == "__main__":
    main()
