"""One logged quantity, reduced to a number or a list."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

from rollflow.stream.data.errors import MetricsError

DEFAULT_EMA_COEFF = 0.01


def name_of(path: tuple[str, ...]) -> str:
    """Quoted name, for messages."""
    return "'" + "/".join(map(str, path)) + "'"


class Reduction(NamedTuple):
    """Options by which a statistic is reduced, as `MetricsLogger` describes them."""

    reduce: str | None
    window: int | None
    ema_coeff: float | None
    clear_on_reduce: bool

    @classmethod
    def of(cls, reduce: str | None, window: int | None, ema_coeff: float | None, clear_on_reduce: bool) -> Self:
        """Make it, with the default coefficient for a mean that is an exponential average."""
        if ema_coeff is None and reduce == "mean" and window is None and not clear_on_reduce:
            ema_coeff = DEFAULT_EMA_COEFF
        return cls(reduce, window, ema_coeff, clear_on_reduce)

    @property
    def keeps_values(self) -> bool:
        """True if single values are kept, and not their total alone."""
        return self.window is not None or self.reduce is None

    def check(self, path: tuple[str, ...]) -> None:
        """Raise MetricsError for options that don't go together."""
        name, (reduce, window, ema_coeff, clears) = name_of(path), self
        if reduce is not None and reduce not in _REDUCE:
            raise MetricsError(f"{name}: reduce is {reduce!r}, expected 'mean', 'min', 'max', 'sum' or None")
        if window is not None and (not isinstance(window, int) or window < 1):
            raise MetricsError(f"{name}: window is {window!r}, expected a whole number from 1 on")
        if ema_coeff is not None and (reduce != "mean" or window is not None or clears):
            raise MetricsError(f"{name}: ema_coeff is for reduce='mean' without window and clear_on_reduce")
        if ema_coeff is not None and not 0.0 < ema_coeff <= 1.0:
            raise MetricsError(f"{name}: ema_coeff is {ema_coeff}, expected more than 0 and at most 1")

    def check_same(self, path: tuple[str, ...], other: "Reduction") -> None:
        """Raise MetricsError unless a value that is logged now has the same options."""
        if self != other:
            raise MetricsError(
                f"{name_of(path)} was logged with {self._text()} before, now with {other._text()}: "
                "a name has one way to be reduced"
            )

    def _text(self) -> str:
        return ", ".join(f"{option}={value!r}" for option, value in self._asdict().items())


class Statistic:
    """Values that come in one by one.

    reduction    how they are reduced
    count        number of values since it was cleared
    """

    __slots__ = ("_total", "_values", "count", "reduction")

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self.count = 0
        self._total: float = 0
        self._values: list[float] = []

    def push(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        reduce, window, ema_coeff, _ = self.reduction
        if self.reduction.keeps_values:
            self._values.append(value)
            if window is not None and len(self._values) >= 2 * window:
                del self._values[:-window]
        elif self.count == 1:
            self._total = value
        elif ema_coeff is not None:
            self._total += ema_coeff * (value - self._total)
        elif reduce == "min" or reduce == "max":
            self._total = _REDUCE[reduce]((self._total, value))
        else:
            self._total += value

    def value(self) -> Any:
        """Reduce the values: to a number, or to a list; without any, NaN, 0 for a sum, [] for a list."""
        reduce, _, ema_coeff, _ = self.reduction
        if reduce is None:
            return self.values()
        if reduce != "sum" and not self.count:
            return math.nan
        if self.reduction.keeps_values:
            return _REDUCE[reduce](self.values())
        return self._total / self.count if reduce == "mean" and ema_coeff is None else self._total

    def values(self) -> list[float]:
        """Values that are kept, oldest first."""
        window = self.reduction.window
        return list(self._values) if window is None else self._values[-window:]

    def get_state(self) -> dict[str, Any]:
        """Everything, in numbers, strings and lists."""
        return {**self.reduction._asdict(), "count": self.count, "total": self._total, "values": self.values()}

    @classmethod
    def from_state(cls, path: tuple[str, ...], state: Mapping[str, Any]) -> Self:
        """Make it from what `get_state` gave. Raises MetricsError for anything else."""
        missing = sorted({*Reduction._fields, "count", "total", "values"} - state.keys())
        if missing:
            raise MetricsError(f"{name_of(path)}: a state without {missing}: it is no statistic's")
        made = cls(Reduction(*(state[option] for option in Reduction._fields)))
        made.count, made._total, made._values = state["count"], state["total"], list(state["values"])
        return made

    @classmethod
    def merged(cls, several: Sequence["Statistic"]) -> Self:
        """Make one of all values that any of them has seen; they have the same options."""
        made = cls(several[0].reduction)
        made.count = sum(each.count for each in several)
        logged = [each for each in several if each.count]
        reduce, window, ema_coeff, _ = made.reduction
        if made.reduction.keeps_values:
            made._values = _newest_of([each.values() for each in logged], window)
        elif logged and ema_coeff is not None:
            weights = [min(each.count, 1.0 / ema_coeff) for each in logged]
            weighted = [weight * each._total for weight, each in zip(weights, logged, strict=True)]
            made._total = math.fsum(weighted) / math.fsum(weights)
        elif logged:
            totals = [each._total for each in logged]
            made._total = _sum(totals) if reduce in ("mean", "sum") else _REDUCE[str(reduce)](totals)
        return made


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if any(isinstance(value, float) for value in values) else sum(values)


def _min(values: Sequence[float]) -> float:
    return min(values) if not any(map(math.isnan, values)) else math.nan


def _max(values: Sequence[float]) -> float:
    return max(values) if not any(map(math.isnan, values)) else math.nan


_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": _mean, "min": _min, "max": _max, "sum": _sum}


def _newest_of(lists: list[list[float]], window: int | None) -> list[float]:
    """All values, list by list; with a window, the newest of each list in turn, until it is full."""
    if window is None:
        return [value for values in lists for value in values]
    lists = sorted(lists)  # so that their order makes no difference
    by_age = (values[-age] for age in range(1, window + 1) for values in lists if age <= len(values))
    return list(islice(by_age, window))[::-1]
