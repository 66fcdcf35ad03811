"""One logged quantity, reduced to a number."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Self

from rollflow.stream.errors import MetricsError

DEFAULT_EMA_COEFF = 0.01


class Statistic:
    """Values that come in one by one.

    reduce, window, ema_coeff, clear_on_reduce    as `MetricsLogger` has them
    count                                         values that came in since it was cleared
    """

    __slots__ = ("_total", "_values", "clear_on_reduce", "count", "ema_coeff", "reduce", "window")

    def __init__(self, reduce: str | None, window: int | None, ema_coeff: float | None, clear_on_reduce: bool) -> None:
        self.reduce = reduce
        self.window = window
        self.ema_coeff = ema_coeff
        self.clear_on_reduce = clear_on_reduce
        self.count = 0
        self._total: float = 0
        self._values: list[float] = []

    @classmethod
    def made(
        cls, path: tuple[str, ...], reduce: str | None, window: int | None, ema_coeff: float | None, clear: bool
    ) -> Self:
        """One that has not seen a value. Raises MetricsError for options that don't go together."""
        where = "/".join(path)
        if reduce is not None and reduce not in _REDUCE:
            raise MetricsError(f"'{where}': reduce is {reduce!r}, expected 'mean', 'min', 'max', 'sum' or None")
        if window is not None and (not isinstance(window, int) or window < 1):
            raise MetricsError(f"'{where}': window is {window!r}, expected a whole number from 1 on")
        if ema_coeff is not None and (reduce != "mean" or window is not None or clear):
            raise MetricsError(f"'{where}': ema_coeff is for reduce='mean' without window and clear_on_reduce")
        if ema_coeff is not None and not 0.0 < ema_coeff <= 1.0:
            raise MetricsError(f"'{where}': ema_coeff is {ema_coeff}, expected more than 0 and at most 1")
        return cls(reduce, window, _ema_coeff(reduce, window, ema_coeff, clear), clear)

    def check(
        self, path: tuple[str, ...], reduce: str | None, window: int | None, ema_coeff: float | None, clear: bool
    ) -> None:
        """Raise MetricsError unless it was made with these options."""
        ema_coeff = _ema_coeff(reduce, window, ema_coeff, clear)
        if (reduce, window, ema_coeff, clear) != (self.reduce, self.window, self.ema_coeff, self.clear_on_reduce):
            raise MetricsError(
                f"'{'/'.join(path)}' was logged with {self._options()} before, now with "
                f"{Statistic(reduce, window, ema_coeff, clear)._options()}: a name has one way to be reduced"
            )

    def push(self, value: float) -> None:
        """Take one value."""
        self.count += 1
        if self._keeps_values:
            self._values.append(value)
            if self.window is not None and len(self._values) >= 2 * self.window:
                del self._values[: -self.window]
        elif self.count == 1:
            self._total = value
        elif self.ema_coeff is not None:
            self._total += self.ema_coeff * (value - self._total)
        elif self.reduce == "min" or self.reduce == "max":
            self._total = _REDUCE[self.reduce]((self._total, value))
        else:
            self._total += value

    def value(self) -> Any:
        """What the values are reduced to: NaN where there are none, 0 for a sum, [] for a list."""
        values = self.values()
        if self.reduce is None:
            return values
        if self.reduce == "sum":
            return _sum(values) if self._keeps_values else self._total
        if not self.count:
            return math.nan
        if self._keeps_values:
            return _REDUCE[self.reduce](values)
        return self._total / self.count if self.reduce == "mean" and self.ema_coeff is None else self._total

    def values(self) -> list[float]:
        """The values that it keeps, oldest first."""
        return self._values[-self.window :] if self.window is not None else list(self._values)

    def clear(self) -> None:
        """Forget all values."""
        self.count = 0
        self._total = 0
        self._values = []

    def get_state(self) -> dict[str, Any]:
        """Everything, in numbers, strings and lists."""
        return {
            "reduce": self.reduce,
            "window": self.window,
            "ema_coeff": self.ema_coeff,
            "clear_on_reduce": self.clear_on_reduce,
            "count": self.count,
            "total": self._total,
            "values": self.values(),
        }

    @classmethod
    def from_state(cls, path: tuple[str, ...], state: Mapping[str, Any]) -> Self:
        """What `get_state` gave. Raises MetricsError for what it did not."""
        missing = sorted(_STATE - state.keys())
        if missing:
            raise MetricsError(f"'{'/'.join(path)}': a state without {missing}: it is no statistic's")
        made = cls(state["reduce"], state["window"], state["ema_coeff"], state["clear_on_reduce"])
        made.count, made._total, made._values = state["count"], state["total"], list(state["values"])
        return made

    @classmethod
    def merged(cls, several: Sequence["Statistic"]) -> Self:
        """Of all values that any of them has seen; they have the same options."""
        first = several[0]
        made = cls(first.reduce, first.window, first.ema_coeff, first.clear_on_reduce)
        made.count = sum(each.count for each in several)
        seen = [each for each in several if each.count]
        if made._keeps_values:
            made._values = _newest_of([each.values() for each in seen], made.window)
        elif seen and made.ema_coeff is not None:
            weights = [min(each.count, 1.0 / made.ema_coeff) for each in seen]
            weighted = [weight * each._total for weight, each in zip(weights, seen, strict=True)]
            made._total = math.fsum(weighted) / math.fsum(weights)
        elif seen:
            totals = [each._total for each in seen]
            made._total = _sum(totals) if made.reduce in ("mean", "sum") else _REDUCE[str(made.reduce)](totals)
        return made

    @property
    def _keeps_values(self) -> bool:
        return self.window is not None or self.reduce is None

    def _options(self) -> str:
        return f"reduce={self.reduce!r}, window={self.window}, ema_coeff={self.ema_coeff}, clear_on_reduce=" + str(
            self.clear_on_reduce
        )


def _ema_coeff(reduce: str | None, window: int | None, ema_coeff: float | None, clear: bool) -> float | None:
    averages = reduce == "mean" and window is None and not clear
    return DEFAULT_EMA_COEFF if averages and ema_coeff is None else ema_coeff


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if any(isinstance(value, float) for value in values) else sum(values)


def _min(values: Sequence[float]) -> float:
    return min(values) if not any(map(math.isnan, values)) else math.nan


def _max(values: Sequence[float]) -> float:
    return max(values) if not any(map(math.isnan, values)) else math.nan


_STATE = {"reduce", "window", "ema_coeff", "clear_on_reduce", "count", "total", "values"}

_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": _mean, "min": _min, "max": _max, "sum": _sum}


def _newest_of(lists: list[list[float]], window: int | None) -> list[float]:
    """Without a window all values, list by list; else the newest of each in turn, until `window` are there."""
    if window is None:
        return [value for values in lists for value in values]
    lists = sorted(lists)  # so that their order makes no difference
    by_age = (values[-age] for age in range(1, window + 1) for values in lists if age <= len(values))
    return list(islice(by_age, window))[::-1]
