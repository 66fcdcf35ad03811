"""Figures that connector pieces and learners log, reduced over time and merged across processes."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from statistics import fmean
from threading import RLock
from typing import Any, Literal, NamedTuple, Self

from rollflow.stream.data.errors import MetricsError, shown

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
        self._values: deque[float] = deque(maxlen=self.reduction.window)

    def push(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        reduce, _, ema_coeff, _ = self.reduction
        if self.reduction.keeps_values:
            self._values.append(value)
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
        return list(self._values)

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
        made.count, made._total = state["count"], state["total"]
        made._values.extend(state["values"])
        return made

    @classmethod
    def merged(cls, several: Sequence["Statistic"]) -> Self:
        """Make one of all values that any of them has seen; they have the same options."""
        made = cls(several[0].reduction)
        made.count = sum(each.count for each in several)
        logged = [each for each in several if each.count]
        reduce, window, ema_coeff, _ = made.reduction
        if made.reduction.keeps_values:
            made._values.extend(_newest_of([each.values() for each in logged], window))
        elif logged and ema_coeff is not None:
            weights = [min(each.count, 1.0 / ema_coeff) for each in logged]
            weighted = [weight * each._total for weight, each in zip(weights, logged, strict=True)]
            made._total = math.fsum(weighted) / math.fsum(weights)
        elif logged:
            totals = [each._total for each in logged]
            made._total = _sum(totals) if reduce in ("mean", "sum") else _REDUCE[str(reduce)](totals)
        return made


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if any(isinstance(value, float) for value in values) else sum(values)


def _min(values: Sequence[float]) -> float:
    return min(values) if not any(map(math.isnan, values)) else math.nan


def _max(values: Sequence[float]) -> float:
    return max(values) if not any(map(math.isnan, values)) else math.nan


_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "min": _min, "max": _max, "sum": _sum}


def _newest_of(lists: list[list[float]], window: int | None) -> list[float]:
    """All values, list by list; with a window, the newest of each list in turn, until it is full."""
    if window is None:
        return [value for values in lists for value in values]
    lists = sorted(lists)  # so that their order makes no difference
    by_age = (values[-age] for age in range(1, window + 1) for values in lists if age <= len(values))
    return list(islice(by_age, window))[::-1]


Key = str | tuple[str, ...]
Reduce = Literal["mean", "min", "max", "sum"] | None

_MISSING: Any = object()


class MetricsLogger:
    """Named statistics; a name is a string, or a tuple of strings for nested ones.

    The first value that is logged under a name settles how it is reduced:

        reduce="mean"             of the last `window` values; without a window, an exponential average with
                                  `ema_coeff` (0.01) for each new value, or with `clear_on_reduce` the mean of those
                                  since the last `reduce()`
        reduce="min"|"max"|"sum"  of the last `window` values, or of all; with `clear_on_reduce` of those since the last
                                  `reduce()`
        reduce=None               the values themselves, as a list; the last `window` of them

    Every method may be called from any thread. Raises MetricsError, a ValueError, for a value that is no number and for
    a name that is logged in two ways.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._statistics: dict[tuple[str, ...], Statistic] = {}

    def __repr__(self) -> str:
        with self._lock:
            names = sorted("/".join(path) for path in self._statistics)
        return f"<MetricsLogger: {', '.join(names) or 'nothing logged'}>"

    def log_value(
        self,
        key: Key,
        value: Any,
        *,
        reduce: Reduce = "mean",
        window: int | None = None,
        ema_coeff: float | None = None,
        clear_on_reduce: bool = False,
    ) -> None:
        """Log one number: a Python one, or the only element of an array or tensor."""
        path, reduction = _path_of(key), Reduction.of(reduce, window, ema_coeff, clear_on_reduce)
        number = number_of(path, value)
        with self._lock:
            statistic = self._statistics.get(path)
            if statistic is None:
                _check_place(path, self._statistics)
                reduction.check(path)
                statistic = self._statistics[path] = Statistic(reduction)
            else:
                statistic.reduction.check_same(path, reduction)
            statistic.push(number)

    def peek(self, key: Key, default: Any = _MISSING) -> Any:
        """Reduced value of a name, or a dict of all names under it; nothing is cleared.

        A name without values since it was cleared is NaN, 0 if it is a sum, [] if it is a list. Raises KeyError for a
        name that was never logged, unless there is a default.
        """
        path = _path_of(key)
        with self._lock:
            if path in self._statistics:
                return self._statistics[path].value()
            under = {name[len(path) :]: each for name, each in self._statistics.items() if name[: len(path)] == path}
            if under:
                return _nested({rest: each.value() for rest, each in under.items()})
            if default is _MISSING:
                names = ", ".join(map(name_of, self._statistics)) or "none"
                raise KeyError(f"{name_of(path)} was never logged; names: {names}")
            return default

    def reduce(self) -> dict[str, Any]:
        """Reduced values of all names, as nested dicts; names with `clear_on_reduce` are cleared."""
        with self._lock:
            reduced = _nested({path: statistic.value() for path, statistic in self._statistics.items()})
            for statistic in self._statistics.values():
                if statistic.reduction.clear_on_reduce:
                    statistic.clear()
            return reduced

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self._statistics.clear()

    def keys(self) -> list[tuple[str, ...]]:
        """All names, in the order in which they were first logged."""
        with self._lock:
            return list(self._statistics)

    def __contains__(self, key: Key) -> bool:
        return _path_of(key) in self._statistics

    # Across processes

    def get_state(self) -> dict[str, Any]:
        """All statistics, in numbers, strings, lists and dicts alone."""
        with self._lock:
            return {"statistics": [[list(path), each.get_state()] for path, each in self._statistics.items()]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replace everything by what `get_state` gave."""
        statistics = _statistics_of(state)
        with self._lock:
            self._statistics = statistics

    def merge(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Add what other loggers have logged, by their states. Add each value only once: log, send, and `reset`.

        Sums are added, least and largest values compared, and means weighted by their numbers of values, an exponential
        average by no more than it remembers. Windows take the newest of every logger in turn, until they are full;
        lists are joined, this logger's first. But for lists, the order of the loggers makes no difference.
        """
        theirs = [_statistics_of(state) for state in states]
        with self._lock:
            mine = self._statistics
            merged = dict(mine)
            for path in dict.fromkeys(path for each in (mine, *theirs) for path in each):
                several = [each[path] for each in (mine, *theirs) if path in each]
                for other in several[1:]:
                    several[0].reduction.check_same(path, other.reduction)
                if path not in merged:
                    _check_place(path, merged)
                merged[path] = Statistic.merged(several)
            self._statistics = merged


def _path_of(key: Key) -> tuple[str, ...]:
    if isinstance(key, str):
        return (key,)
    if not isinstance(key, tuple):
        raise MetricsError(f"the name {key!r} was to be logged, expected a string or a tuple of strings")
    return key


def number_of(path: tuple[str, ...], value: Any) -> float | int:
    if type(value) is float or type(value) is int:
        return value
    try:
        number = value.item() if hasattr(value, "item") else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if not isinstance(number, float | int):
        raise MetricsError(f"{name_of(path)} was given {shown(value)}, expected one number")
    return number


def _check_place(path: tuple[str, ...], others: Iterable[tuple[str, ...]]) -> None:
    if not path or not all(isinstance(part, str) for part in path):
        raise MetricsError(f"the name {path!r} was to be logged, expected a string or a tuple of strings")
    for other in others:
        shorter = min(len(path), len(other))
        if path[:shorter] == other[:shorter]:
            raise MetricsError(
                f"{name_of(path)} can't be logged beside {name_of(other)}: one would lie inside the other"
            )


def _nested(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        branch = tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = value
    return tree


def _statistics_of(state: Mapping[str, Any]) -> dict[tuple[str, ...], Statistic]:
    if "statistics" not in state:
        raise MetricsError(f"a state with {sorted(map(str, state))}, expected 'statistics'")
    statistics: dict[tuple[str, ...], Statistic] = {}
    for name, each in state["statistics"]:
        path = tuple(name)
        _check_place(path, statistics)
        statistics[path] = Statistic.from_state(path, each)
    return statistics
