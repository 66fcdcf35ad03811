"""Silent faults that fragments show: values that never change or are no numbers, weights and lanes left behind, memory.

Every fragment is counted. Its columns are read only if the doctor has asked for it since the last one, twice a
second at most, and then of some transitions.
"""

from collections.abc import Iterator, Set
from statistics import median_high
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.blocks import root_of
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.system import memory_bound
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment
from rollflow.stream.observe.waits import Sign

_SAMPLE = 256  # transitions of a fragment that are looked at
_LOOKS = 30  # after which values are said never to change
_VERSIONS = 10  # through which they have not; that were published and are not used
_ROUNDS = 20  # fragments of every lane that were made without them, or that may be in use
_NAN, _MOST_NAN, _FADE = 10.0, 20.0, 0.25  # looks that found NaN, and what each other look takes from them
_LANES, _USUAL, _FEW = 3, 50, 0.2  # lanes; fragments of the middle one; share of these that is told
_SURE = 1.0 - 1e-6  # probability of an action from which on it has no entropy
_HELD, _HELD_SHARE = 100, 0.9  # fragments in memory, and share of all
_MEMORY_SHARE = 0.1
_MEMORY = memory_bound()
_NOUNS = {Columns.ACTIONS: "actions", Columns.REWARDS: "rewards", Columns.OBS: "observations"}


class _Same(NamedTuple):
    """A value that a column has had since some look."""

    value: tuple[bytes, ...]
    text: str
    version: int
    looks: int = 1


class FragmentChecks:
    """Finds silent faults in the fragments of a rollout. Call it with every fragment, once; ask `signs` at each look.

    Signs are asked for from another thread than the one that calls.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._given: dict[int, int] = {}  # lane -> fragments
        self._count = 0
        self._base: dict[int, int] = {}  # lane -> fragments, when lanes were compared last; of those at work ever since
        self._behind: dict[int, int] = {}  # lane -> fragments that it gave, which are few
        self._usual = ""  # what the others gave meanwhile
        self._nan = 0.0  # looks that found observations NaN; actions that are NaN raise an error
        self._outside = ""  # what is told of an action that its space has not
        self._same: dict[str, _Same] = {}
        self._version = -1  # newest that acted in a fragment
        self._looked_at = 0  # fragments up to the one that was looked at last
        self._unused: tuple[int, int, int] | None = None  # version in use, newer one published, fragments then
        self._held: WeakValueDictionary[int, NDArray[Any]] = WeakValueDictionary()  # memory that was not freed
        self._bytes = 0  # of the fragment that was looked at last

    def __call__(self, fragment: AnyFragment) -> None:
        """Count a fragment, and look at it if that is asked for."""
        self._given[fragment.lane] = fragment.sequence + 1
        self._count += 1
        parts: Any = getattr(fragment, "parts", (fragment,))
        self._held[self._count] = root_of(parts[0].outline.columns[Columns.REWARDS].tree)
        acted = [part for part in parts if not part.is_empty]
        if self._is_asked and acted and acted[0].device is None:
            self._is_asked = False
            self._look_at(acted)

    def signs(self, published: int, lanes: Set[int]) -> Iterator[Sign]:
        """The faults that there are now; has the next fragment looked at.

        published    version published last
        lanes        that make fragments, or should: neither lost nor gone
        """
        self._is_asked = True
        yield from self._of_values()
        yield from self._of_versions(published)
        yield from self._of_lanes(lanes)
        held, most_used = len(self._held), max(_HELD, _ROUNDS * len(self._given), _HELD_SHARE * self._count)
        if held >= most_used and held * self._bytes > _MEMORY_SHARE * _MEMORY:
            yield Sign(
                "memory",
                f"{held:,} of {self._count:,} fragments that were given are still in memory, {held * self._bytes:,} "
                "bytes: something keeps them, or views of them; copy what is kept, as rollflow.Replay does",
            )

    # Inside

    def _look_at(self, parts: list[Any]) -> None:
        self._looked_at = self._count
        self._bytes = sum(
            leaf.nbytes for part in parts for column in part.columns.values() for leaf in leaves_of(column.tree)
        )
        sampled = [(part, *_sample_of(part)) for part in parts]
        self._version = max(int(_values(*each, Columns.POLICY_VERSION)[0].max()) for each in sampled)
        for name in _NOUNS:
            values = [leaf for each in sampled for leaf in _values(*each, name)]
            self._note(name, [] if any(_is_one_by_nature(part, name) for part in parts) else values)
            if name == Columns.OBS:
                has_nan = any(leaf.dtype.kind == "f" and np.isnan(leaf).any() for leaf in values)
                self._nan = min(_MOST_NAN, self._nan + 1) if has_nan else max(0.0, self._nan - _FADE)
        self._outside = next((text for each in sampled if (text := _outside(*each))), "")
        is_sure = all(_is_sure(*each) for each in sampled)
        self._note("entropy", [np.ones(1)] if is_sure else [])

    def _note(self, name: str, values: list[NDArray[Any]]) -> None:
        """Take note of whether a column has had one value since an earlier look."""
        values = [leaf for leaf in values if leaf.size]
        if not values or not all(leaf.dtype.kind in "biuf" and (leaf == leaf[0]).all() for leaf in values):
            self._same.pop(name, None)
            return
        value, last = tuple(leaf[0].tobytes() for leaf in values), self._same.get(name)
        if last is not None and last.value == value:
            self._same[name] = last._replace(looks=last.looks + 1)
        else:
            text = f" {values[0].item(0):g}" if len(values) == 1 and values[0][0].size == 1 else " one value"
            self._same[name] = _Same(value, text, self._version)

    def _of_values(self) -> Iterator[Sign]:
        if self._nan >= _NAN:
            yield Sign("obs nan", "observations are NaN in fragment after fragment")
        if outside := self._outside:
            yield Sign("actions outside", outside)
        for name, same in self._same.copy().items():
            versions = self._version - same.version
            if same.looks < _LOOKS or versions < _VERSIONS:
                continue
            through = f"in {same.looks} fragments that were looked at, through {versions} policy versions"
            if name == "entropy":
                text = f"every action was the likeliest one, with a probability above {_SURE:g}, {through}: no entropy"
            else:
                also = ", and no episode has ended" if name == Columns.REWARDS else ""
                text = f"{_NOUNS[name]} were all{same.text}{also} {through}"
            yield Sign(f"{name} same", text)

    def _of_versions(self, published: int) -> Iterator[Sign]:
        if self._version < 0 or published <= self._version:
            self._unused = None
            return
        if self._unused is None or self._unused[0] != self._version:
            self._unused = self._version, published, self._count
        _, first, counted = self._unused
        made = self._looked_at - counted  # what came after that may have newer weights
        if published - first >= _VERSIONS and made >= _ROUNDS * len(self._given):
            yield Sign(
                "unused",
                f"version {first} was published {made:,} fragments ago, and {published - first} after it, and none "
                f"acts: fragments are made with version {self._version}; look at what keeps weights from those who "
                "act, or at how far the rollout runs ahead",
            )

    def _of_lanes(self, lanes: Set[int]) -> Iterator[Sign]:
        given = self._given.copy()
        self._base = {lane: count for lane, count in self._base.items() if lane in lanes}
        gained = {lane: given.get(lane, 0) - count for lane, count in sorted(self._base.items())}
        usual = median_high([*gained.values()] or [0])
        if len(gained) < _LANES or usual >= _USUAL:
            self._base = {lane: given.get(lane, 0) for lane in lanes}
        if len(gained) >= _LANES and usual >= _USUAL:
            most = max(given.values())  # a lane that has given as many may have ended
            few = {lane: count for lane, count in gained.items() if count <= _FEW * usual}
            self._behind = {lane: count for lane, count in few.items() if given.get(lane, 0) < most}
            self._usual = f"fragments while the middle one of {len(gained)} lanes gave {usual:g}"
        behind = [f"lane {lane} gave {count}" for lane, count in self._behind.items() if lane in lanes]
        if behind:
            yield Sign("lanes", f"{', '.join(behind)} {self._usual}")


def _sample_of(part: Fragment) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and slots, i64[K] each, of some of a fragment's transitions; others with the next fragment."""
    chunks = part.chunks
    lengths = chunks.stop - chunks.start
    ends = np.cumsum(lengths)
    count = min(_SAMPLE, int(ends[-1]))
    at = (np.arange(count) * ends[-1] // count + part.sequence) % ends[-1]
    chunk = np.searchsorted(ends, at, side="right")
    return chunks.stop[chunk] - (ends[chunk] - at), chunks.slot[chunk]


def _values(part: Fragment, rows: NDArray[np.int64], slots: NDArray[np.int64], name: str) -> list[NDArray[Any]]:
    """The leaves of a column, any[K, ...] each, at some transitions."""
    if name == Columns.OBS:  # they may be large
        rows, slots = rows[::4], slots[::4]
    return [leaf[rows, slots] for leaf in leaves_of(part.columns[name].tree)]


def _is_one_by_nature(part: Fragment, name: str) -> bool:
    """True if a column may well have one value: no choice of actions, episodes of a step, rewards of each step."""
    if name == Columns.ACTIONS:
        return getattr(part.layout.action_space, "n", 2) == 1
    chunks = part.chunks
    if name == Columns.OBS:
        return bool((chunks.t_started + chunks.stop - chunks.start).max() == 1)
    return bool((chunks.terminated | chunks.truncated).any())  # then returns are looked at


def _outside(part: Fragment, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> str:
    """What is told of actions that their Discrete space has not; "": there are none."""
    space = part.layout.action_space
    if not isinstance(space, gym.spaces.Discrete):
        return ""
    [actions] = _values(part, rows, slots, Columns.ACTIONS)
    outside = actions[(actions < space.start) | (actions >= space.start + space.n)]
    return f"the module's actions are outside of {space}: {outside[0]} is one of them" if outside.size else ""


def _is_sure(part: Fragment, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> bool:
    """True if every action was the likeliest of a categorical distribution, and had all of the probability."""
    space = part.layout.action_space
    if not isinstance(space, gym.spaces.Discrete) or space.n == 1 or Columns.ACTION_DIST_INPUTS not in part.columns:
        return False
    inputs, actions = (_values(part, rows, slots, name) for name in (Columns.ACTION_DIST_INPUTS, Columns.ACTIONS))
    if [leaf.shape for leaf in inputs] != [(len(rows), space.n)]:  # of a distribution of one's own
        return False
    logits = inputs[0]
    if not np.array_equal(actions[0], logits.argmax(1) + space.start):
        return False
    with np.errstate(invalid="ignore"):  # a row may be masked as a whole
        odds = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64).sum(1)
    return bool((1.0 / odds >= _SURE).all())
