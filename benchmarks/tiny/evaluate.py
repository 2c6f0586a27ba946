"""Measures the shipped checkpoint on held-out cases: `python -m benchmarks.tiny.evaluate`.

Everything runs through `glm_jax`, teacher-forced, which decides greedy decoding exactly: an answer comes out
precisely when each of its tokens is the likeliest one after those before it. Rows go to benchmarks/results/.
"""

import argparse
import dataclasses
import datetime
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import glm_jax
from benchmarks.kernels.harness import RESULTS, table, write
from benchmarks.tiny.acceptance import accepted_drafts
from benchmarks.tiny.cases import Batch, Case, collate, json_case, problem_case, recall_case, tool_case
from benchmarks.tiny.inside import look
from glm_jax.quantize import quantized

DRAFTS = 3
LOOKED_AT = 8  # rows of each answer whose attention is looked into
RECALL_LENGTHS = (250, 500, 1000, 2000)
SHOTS = 20
SEED = 20261130

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a set of cases shows.

    right [cases] bool; accepted: drafts taken in each full verify window of the right answers; nll: mean over
    answer tokens, nats; covered [MLA layers]: mean share of attention mass on the selection.
    """

    right: np.ndarray
    accepted: list[int]
    nll: float
    covered: np.ndarray


class Evaluation:
    """A loaded model, sizes, and the rows found so far; each row is written when it is found."""

    def __init__(
        self,
        model: glm_jax.Model,
        cases: int,
        batch: int,
        lengths: Sequence[int] = RECALL_LENGTHS,
        results: Path = RESULTS,
    ):
        if model.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: its cases cannot be written")
        self.model, self.cases, self.batch, self.lengths = model, cases, batch, lengths
        self.results = results
        self.encode: Callable[[str], list[int]] = model.tokenizer.encode
        self.rows: list[Row] = []

    def draw(self, make: Callable[[random.Random], Case]) -> Batch:
        r = random.Random(SEED)
        return collate([make(r) for _ in range(self.cases)], self.model.config.pad_token_id)

    def run(
        self,
        data: Batch,
        *,
        index_topk: int | None = None,
        model: glm_jax.Model | None = None,
        fp8_latents: bool = False,
        drafts: int = 0,
    ) -> Findings:
        """index_topk: instead of the configuration's; model: instead of the one loaded."""
        model = model or self.model
        config = dataclasses.replace(model.config, index_topk=index_topk or model.config.index_topk)
        at = np.linspace(data.start - 1, data.stop - 2, LOOKED_AT).round().astype(np.int32).T
        right, accepted, losses, covered = [], [], [], []
        for begin in range(0, len(data.tokens), self.batch):
            some = slice(begin, begin + self.batch)
            tokens = data.tokens[some]
            missing = self.batch - len(tokens)  # the last batch is filled up, so that one program serves all
            tokens_, at_ = (np.pad(x, ((0, missing), (0, 0))) for x in (tokens, at[some]))
            seen = look(
                model.params,
                config,
                jnp.asarray(tokens_),
                jnp.asarray(at_),
                fp8_latents=fp8_latents,
                steps=drafts,
            )
            best, guessed, likelihood = (np.asarray(x) for x in (seen.best, seen.drafts, seen.log_likelihood))
            covered.append(np.asarray(seen.covered)[:, : len(tokens)])
            for i, (ids, start, stop) in enumerate(
                zip(tokens, data.start[some], data.stop[some], strict=True)
            ):
                right.append(bool((best[i, start - 1 : stop - 1] == ids[start:stop]).all()))
                losses.append(-likelihood[i, start - 1 : stop - 1])
                if right[-1] and drafts:
                    accepted += accepted_drafts(ids, guessed[:, i], start, stop)
        mass = np.concatenate(covered, 1).mean((1, 2))
        return Findings(np.array(right), accepted, float(np.concatenate(losses).mean()), mass)

    def add(self, name: str, value: float, unit: str, better: str, target: float | None = None) -> None:
        row = {"name": name, "value": float(f"{value:.5g}"), "unit": unit, "better": better, "target": target}
        row |= {"cases": self.cases, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
        row["date"] = datetime.date.today().isoformat()
        self.rows.append({key: v for key, v in row.items() if v is not None})
        write(self.rows[-1:], "tiny", self.results)  # at once: a long run may be cut short
        print(f"{name}: {value:.4g} {unit}", flush=True)

    def problems(self) -> None:
        for shots, target in ((SHOTS, 0.95), (0, None)):
            data = self.draw(lambda r: problem_case(r, self.encode, shots))  # noqa: B023 - drawn at once
            found = self.run(data, drafts=DRAFTS if shots else 0)
            self.add(f"word problems, {shots}-shot, right", found.right.mean(), "share", "higher", target)
            if not shots:
                continue
            accepted = np.array(found.accepted)
            self.add("MTP tokens a step, 3 drafts, greedy", 1 + accepted.mean(), "tokens", "higher", 3.4)
            for j in range(DRAFTS):
                self.add(f"MTP acceptance, draft {j + 1}", (accepted > j).mean(), "share", "higher")
            for layer, share in enumerate(found.covered):
                name = f"attention mass on chosen pools, word problems, MLA layer {layer}"
                self.add(name, share, "share", "higher")

    def recall(self) -> None:
        served = self.model.config.index_topk
        for length in self.lengths:
            data = self.draw(lambda r: recall_case(r, self.encode, length))  # noqa: B023 - drawn at once
            name = f"recall at {int(data.stop.mean())} tokens"
            eighth = length // 8 // self.model.config.index_kpool * self.model.config.index_kpool
            longest = length == RECALL_LENGTHS[-1]
            for topk in dict.fromkeys((served, eighth, data.tokens.shape[1])):
                found = self.run(data, index_topk=topk)
                label = "dense" if topk >= data.tokens.shape[1] else f"index_topk {topk}"
                target = (0.85 if topk == eighth else 0.9) if longest else None
                self.add(f"{name}, {label}, right", found.right.mean(), "share", "higher", target)
                if longest and topk == served:
                    for layer, share in enumerate(found.covered):
                        where = f"attention mass on chosen pools, recall, MLA layer {layer}"
                        self.add(where, share, "share", "higher")

    def formats(self) -> None:
        for name, make in (("tool calls", tool_case), ("JSON answers", json_case)):
            found = self.run(self.draw(lambda r: make(r, self.encode)))  # noqa: B023 - drawn at once
            self.add(f"{name}, exactly right (so well-formed)", found.right.mean(), "share", "higher", 0.95)

    def precision(self) -> None:
        """NLL of the same 20-shot answers in four number formats; everything else float32."""
        data = self.draw(lambda r: problem_case(r, self.encode, SHOTS))
        bf16 = glm_jax.load(self.model.source or "tiny", dtype="bfloat16")
        variants: dict[str, dict[str, Any]] = {
            "float32": {"drafts": DRAFTS},  # the program of `problems` serves again
            "bfloat16": {"model": bf16},
            "fp8 weights": {"model": quantized(self.model)},
            "fp8 latents": {"fp8_latents": True},
        }
        for name, options in variants.items():
            self.add(f"NLL of 20-shot answers, {name}", self.run(data, **options).nll, "nats/token", "lower")


PARTS = ("problems", "recall", "formats", "precision")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", nargs="+", type=int, default=RECALL_LENGTHS, help="tokens, of recall")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--cases", type=int, default=100, help="of each kind")
    parser.add_argument(
        "--batch", type=int, default=2, help="rows at once: 2,048 tokens take about 1 GB each"
    )
    args = parser.parse_args()
    model = glm_jax.load(args.model, dtype="float32")
    evaluation = Evaluation(model, args.cases, args.batch, args.lengths, args.results)
    for part in args.parts:
        begun = time.time()
        getattr(evaluation, part)()
        print(f"{part}: {time.time() - begun:.0f} s", flush=True)
    print(table(evaluation.rows))


if __name__ == "__main__":
    main()
