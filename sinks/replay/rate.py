"""Rate control: how many steps are sampled for each one that is inserted.

With I steps inserted, D removed and S sampled, a ratio r, a minimum m and an error buffer b, let the balance be
I·r - S.

    n steps may be sampled     if I - D ≥ m and the balance stays at least m·r - b
    n steps may be inserted    if I + n - D ≤ m or the balance stays at most m·r + b

An insert that begins below the minimum is always let through: nothing can be sampled until the minimum is reached.
The two conditions leave always one side free if 2·b ≥ (steps of a sample) + (steps of an insert)·r. To ask changes no
count: an insert counts among the sizes once it has come, even if it waits, and a sample once it is drawn.
"""

from dataclasses import dataclass
from typing import Any

from rollflow.nodes.argument_checks import checked_count, checked_number


@dataclass(frozen=True, slots=True)
class SamplesPerInsert:
    """Ratio of sampled to inserted steps that a replay keeps to.

        ratio           steps sampled for each step inserted, above 0
        min_size        steps that must be there before the first sample, from 1 on
        error_buffer    sampled steps by which either side may be ahead; more, where the inserts and samples so far
                        would hold up each other with so few

    Raises ValueError for numbers outside these bounds.
    """

    ratio: float
    min_size: int = 1
    error_buffer: float = 0.0

    def __post_init__(self) -> None:
        checked_number("ratio", self.ratio, above=0, why="steps sampled for each step inserted")
        checked_count("min_size", self.min_size, 1)
        checked_number("error_buffer", self.error_buffer, least=0)

    def buffer(self, inserts: int, samples: int) -> float:
        """The error buffer with which inserts and samples of up to these sizes, in steps, never hold up each other."""
        return max(self.error_buffer, (samples + inserts * self.ratio) / 2, inserts * self.ratio)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay has counted, in steps. `str(report)` is a sentence.

    inserted, removed, sampled    steps so far
    ratio, wanted                 steps sampled for each inserted beyond `min_size`; what was asked for, or None
    waiting                       "insert" or "sample", the side that the rate holds back now; None: neither
    insert_wait_s, sample_wait_s  seconds for which each side was held back
    """

    inserted: int
    removed: int
    sampled: int
    ratio: float
    wanted: float | None
    waiting: str | None
    insert_wait_s: float
    sample_wait_s: float

    def __str__(self) -> str:
        asked = "" if self.wanted is None else f", {self.wanted:g} asked for"
        holds = {"insert": "inserts wait for samples", "sample": "samples wait for inserts", None: "nobody waits"}
        return (
            f"{self.inserted:,} steps inserted, {self.removed:,} removed, {self.sampled:,} sampled: "
            f"{self.ratio:.2f} samples per insert{asked}; {holds[self.waiting]} "
            f"(inserts waited {self.insert_wait_s:.1f} s, samples {self.sample_wait_s:.1f} s)"
        )


class RateLimiter:
    """Counts inserts and samples, and says which may go on.

    rate       None: inserts always may, samples from the first step on
    samples    steps of an ordinary sample

    sampled                  number of steps sampled
    most_inserts             steps of the largest insert that has come so far, or waits
    most_samples             steps of the largest sample so far
    """

    def __init__(self, rate: SamplesPerInsert | None, samples: int = 1) -> None:
        self.rate, self.sampled = rate, 0
        self.most_inserts, self.most_samples = 1, samples

    def admits_insert(self, steps: int, inserted: int, removed: int) -> bool:
        """True if so many steps may be inserted."""
        rate, balance = self.rate, self._balance(inserted)
        if rate is None or inserted - removed < rate.min_size:
            return True
        return balance + steps * rate.ratio <= rate.min_size * rate.ratio + self._buffer(steps)

    def admits_sample(self, steps: int, inserted: int, removed: int) -> bool:
        """True if so many steps may be sampled.

        The buffer suits the samples so far. A larger sample goes on where the largest insert would have to wait, so
        that one of them always goes on.
        """
        rate = self.rate
        if rate is None:
            return inserted > removed
        if inserted - removed < rate.min_size:
            return False
        least = min(steps - self._buffer(), self._buffer() - self.most_inserts * rate.ratio)
        return self._balance(inserted) - rate.min_size * rate.ratio >= least

    def beyond(self, inserted: int) -> int:
        """Steps inserted beyond the minimum."""
        return max(0, inserted - (0 if self.rate is None else self.rate.min_size))

    def _balance(self, inserted: int) -> float:
        ratio = 0.0 if self.rate is None else self.rate.ratio
        return inserted * ratio - self.sampled

    def _buffer(self, inserts: int = 0) -> float:
        """The error buffer, for such an insert and all sizes so far."""
        assert self.rate is not None
        return self.rate.buffer(max(self.most_inserts, inserts), self.most_samples)

    def get_state(self) -> dict[str, Any]:
        """The counts."""
        return {"sampled": self.sampled, "most_inserts": self.most_inserts, "most_samples": self.most_samples}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take the counts of `get_state`."""
        self.sampled, self.most_inserts = state["sampled"], state["most_inserts"]
        self.most_samples = state["most_samples"]
