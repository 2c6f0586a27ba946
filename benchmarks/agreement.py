"""Answers compared problem by problem, across ways of running them: `python -m benchmarks.agreement`.

Greedy answers of a model in float32 to held-out word problems behind twenty solved ones. A plain run (one
request alone, no prefix cache, no drafts, the prompt in one chunk) is compared with prefix caching, asked
twice, with MTP drafts, and with both, asked twice; the latter run many requests at once in small chunks. An
answer that differs counts by its first differing token, which is excused where the two best logits there lie
within 2e-5 of the largest one: sums in another order then decide. All differences are listed.
"""

import argparse
import dataclasses
import datetime
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np

import glm_jax
from benchmarks.kernels.harness import RESULTS, table, write
from benchmarks.tiny.cases import Case, problem_case
from serving import Engine, EngineConfig

EXCUSED_GAP = 2e-5  # of the largest logit
MOST_EXCUSED = 1e-3  # of all tokens
SEED = 20261201

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token of an answer that is not the plain run's. `gap`: between the two best logits there,
    relative to the largest."""

    problem: int
    at: int
    plain: int
    other: int
    gap: float

    @property
    def excused(self) -> bool:
        return self.gap <= EXCUSED_GAP

    def __str__(self) -> str:
        verdict = "excused" if self.excused else "NOT EXCUSED"
        return (
            f"problem {self.problem}, token {self.at}: {self.plain} became {self.other}, "
            f"best two logits {self.gap:.2e} apart, {verdict}"
        )


@dataclasses.dataclass(frozen=True)
class Pass:
    """All problems asked once of an engine."""

    answers: list[list[int]]
    hit: float  # share of prompt tokens from the cache
    acceptance: float  # tokens a decode window


class Agreement:
    def __init__(self, model: glm_jax.Model, problems: int, shots: int, drafts: int, batch: int) -> None:
        if model.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: its problems cannot be written")
        encode = model.tokenizer.encode
        r = random.Random(SEED)
        self.model, self.drafts, self.batch = model, drafts, batch
        self.cases: list[Case] = [problem_case(r, encode, shots) for _ in range(problems)]
        self.room = max(case.stop - case.start for case in self.cases) + 16
        self.context = -(-(max(case.start for case in self.cases) + self.room) // 64) * 64
        self.rows: list[Row] = []
        self.unexcused = 0

    def engine(self, *, caching: bool, drafts: int, alone: bool = False) -> Engine:
        seqs = 1 if alone else self.batch
        return Engine(
            self.model,
            EngineConfig(
                max_model_len=self.context,
                max_num_seqs=seqs,
                max_num_batched_tokens=self.context if alone else max(256, seqs * (drafts + 1)),
                # room for every problem at once, so that a second pass can hit
                num_gpu_blocks_override=max(seqs, len(self.cases)) * self.context // 64,
                num_state_slots_override=3 * seqs + 4 * len(self.cases),
                enable_prefix_caching=caching,
                async_scheduling=not alone,
                speculative_config={"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
            ),
        )

    def ask(self, engine: Engine, *, alone: bool = False) -> Pass:
        sampling = glm_jax.SamplingParams(temperature=0, max_tokens=self.room)
        before = engine.stats()
        requests = []
        for case in self.cases:
            requests.append(engine.submit(case.ids[: case.start], sampling))
            if alone:
                engine.run_until_idle()
        engine.run_until_idle()
        after = engine.stats()
        grown = {name: value - before[name] for name, value in after.items()}
        return Pass(
            answers=[request.token_ids for request in requests],
            hit=grown["prefix_cache_hits"] / grown["prefix_cache_queries"],
            acceptance=1 + grown["accepted_draft_tokens"] / max(grown["drafts"], 1),
        )

    def differences(self, plain: Pass, other: Pass) -> list[Difference]:
        found = []
        for problem, (want, got) in enumerate(zip(plain.answers, other.answers, strict=True)):
            if want == got:
                continue
            at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
            if at is None:  # one is the other's beginning: ends must agree too
                found.append(Difference(problem, min(len(want), len(got)), -1, -1, float("inf")))
            else:
                found.append(Difference(problem, at, want[at], got[at], self._gap(problem, want[:at])))
        return found

    def _gap(self, problem: int, answer: list[int]) -> float:
        """Between the two best logits behind `answer`, over the largest; by the whole-sequence form."""
        case = self.cases[problem]
        known = case.ids[: case.start] + answer
        row = np.zeros((1, self.context), np.int32)
        row[0, : len(known)] = known
        mask = np.arange(self.context)[None] < len(known)
        logits = np.asarray(glm_jax.forward(self.model.params, self.model.config, row, mask))
        scores = np.sort(logits[0, len(known) - 1].astype(np.float64))
        return float((scores[-1] - scores[-2]) / np.abs(scores).max())

    def add(self, name: str, value: float, unit: str, better: str, target: float | None = None) -> None:
        row: Row = {"name": name, "value": float(f"{value:.6g}"), "unit": unit, "better": better}
        row |= {} if target is None else {"target": target}
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        self.rows.append(row | {"date": datetime.date.today().isoformat()})

    def report(self, name: str, plain: Pass, other: Pass) -> None:
        found = self.differences(plain, other)
        unexcused = [difference for difference in found if not difference.excused]
        total, written = len(self.cases), sum(map(len, plain.answers))
        for difference in found:
            print(f"{name}: {difference}", flush=True)
        self.unexcused += len(unexcused)
        self.add(f"answers like the plain run's, {name}", total - len(found), f"of {total}", "higher", total)
        self.add(f"differences not excused, {name}", len(unexcused), "answers", "lower", 0)
        self.add(f"differing first tokens, {name}", len(found) / written, "share", "lower", MOST_EXCUSED)
        self.add(f"prompt tokens from the cache, {name}", other.hit, "share", "higher")
        if "MTP" in name:
            self.add(f"tokens a decode window, {name}", other.acceptance, "tokens", "higher")

    def run(self) -> None:
        plain = self.ask(self.engine(caching=False, drafts=0, alone=True), alone=True)
        right = [a == c.ids[c.start :] for a, c in zip(plain.answers, self.cases, strict=True)]
        self.add("answers exactly right, plain", sum(right), f"of {len(self.cases)}", "higher")
        cached = self.engine(caching=True, drafts=0)
        self.report("prefix caching, first pass", plain, self.ask(cached))
        self.report("prefix caching, second pass", plain, self.ask(cached))
        drafted = f"MTP {self.drafts}"
        self.report(drafted, plain, self.ask(self.engine(caching=False, drafts=self.drafts)))
        both = self.engine(caching=True, drafts=self.drafts)
        self.report(f"both, {drafted}, first pass", plain, self.ask(both))
        self.report(f"both, {drafted}, second pass", plain, self.ask(both))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--shots", type=int, default=20, help="solved problems in front of each")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="requests at once")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results file")
    args = parser.parse_args()
    model = glm_jax.load(args.model, dtype="float32")
    agreement = Agreement(model, args.problems, args.shots, args.drafts, args.batch)
    agreement.run()
    print(table(agreement.rows))
    print(write(agreement.rows, "agreement", args.results))
    if agreement.unexcused:
        raise SystemExit(f"{agreement.unexcused} answers differ without excuse")


if __name__ == "__main__":
    main()
