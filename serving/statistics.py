"""What the engine counts while it runs."""

from collections import Counter


class Statistics:
    """Plain counters, read by `Engine.stats()` and the metrics endpoint."""

    def __init__(self, window: int) -> None:
        """`window`: tokens of a decode window; drafts a window are one fewer."""
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._window = window
        self.accepted_per_position = [0] * (window - 1)
        self.finish_reasons: Counter[str] = Counter()

    def step(self, seconds: float) -> None:
        self._counts["steps"] += 1
        self._seconds += seconds

    def prompted(self, tokens: int) -> None:
        self._counts["prompt_tokens"] += tokens

    def generated(self, tokens: int) -> None:
        self._counts["generation_tokens"] += tokens

    def verified(self, count: int) -> None:
        """One window committed `count` tokens: `count - 1` drafts were accepted."""
        if self._window > 1 and count:
            self._counts["drafts"] += 1
            self._counts["draft_tokens"] += self._window - 1
            self._counts["accepted_draft_tokens"] += count - 1
            for position in range(count - 1):
                self.accepted_per_position[position] += 1

    def finished(self, reason: str) -> None:
        self.finish_reasons[reason] += 1

    def unhealthy(self) -> None:
        self._counts["nan_logits"] += 1

    def as_dict(self) -> dict[str, float]:
        names = (
            "steps", "prompt_tokens", "generation_tokens", "drafts", "draft_tokens",
            "accepted_draft_tokens", "nan_logits",
        )  # fmt: skip
        drafts = self._counts["drafts"]
        return {
            **{name: self._counts[name] for name in names},
            **{f"accepted_at_{i + 1}": n for i, n in enumerate(self.accepted_per_position)},
            "acceptance_length": 1 + self._counts["accepted_draft_tokens"] / drafts if drafts else 1.0,
            "step_seconds": self._seconds,
        }
