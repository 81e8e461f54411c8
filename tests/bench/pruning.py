"""Measures what the two pruning thresholds cost and save on the bundled pair, and checks that the output is unchanged.

python -m tests.bench.pruning
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.support.engines import GeneratedAnswer, GenerationJob, Runner, bundled, prompts, pruned
from workers.comm.ipc import Speculation

THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
HEADER = f"{'threshold':24} {'verified/token':>14} {'drafted/step':>12} {'acceptance length':>17}"


class Row(NamedTuple):
    """The results of one setting over all prompts."""

    speculation: Speculation
    answers: list[GeneratedAnswer]

    @property
    def verified_per_token(self) -> float:
        return self._sum("num_verified_tokens") / sum(len(answer.tokens) for answer in self.answers)

    @property
    def drafted_per_step(self) -> float:
        return self._sum("num_draft_tokens") / max(1, self._sum("num_drafts"))

    @property
    def acceptance_length(self) -> float:
        """Return the acceptance length, 1 + accepted / drafts."""
        return 1 + self._sum("num_accepted_tokens") / max(1, self._sum("num_drafts"))

    def _sum(self, name: str) -> int:
        return sum(getattr(answer.stats, name) for answer in self.answers)

    def __str__(self) -> str:
        asked = self.speculation
        name = f"path_prob {asked.path_prob}" if asked.min_prob is None else f"min_prob {asked.min_prob}"
        return f"{name:24} {self.verified_per_token:14.2f} {self.drafted_per_step:12.2f} {self.acceptance_length:17.2f}"


def sweep(name: str, num_prompts: int = 20, thresholds: tuple[float, ...] = THRESHOLDS) -> list[Row]:
    """Run held-out prompts greedily with rising thresholds of one kind, `min_prob` or `path_prob`."""
    with Runner(bundled(pruned())) as runner:
        rows = []
        for threshold in thresholds:
            options: dict[str, Any] = {name: threshold}
            speculation = Speculation(**options)
            jobs = [GenerationJob(prompt=prompt, speculation=speculation) for prompt in prompts(num_prompts)]
            rows.append(Row(speculation, runner.run(jobs, concurrency=4)))
        return rows


def main() -> None:
    for name in ("min_prob", "path_prob"):
        rows = sweep(name)
        print(HEADER, *rows, sep="\n")
        same = all([a.tokens for a in row.answers] == [a.tokens for a in rows[0].answers] for row in rows)
        print(f"outputs identical under every {name}: {same}\n")


if __name__ == "__main__":
    main()
