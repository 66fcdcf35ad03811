"""Where the fields of one space come from in another one: by themselves where that is clear, else by choices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.adapting.field_map import Origin
from rollflow.nodes.connectors.adapting.fields import Leaf, leaves_within, numbers_within
from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.errors import ConnectorError

Taken = Sequence[int | str | None]
Answer = tuple[Literal["take", "fill", "keep", "scale"], str, Any]
"""(option, field, value) of a choice; `keep` and `scale` have None."""
Used = dict[tuple[str, str], str]
"""(option, name of a field) -> path of the field that it was used for."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What somebody says about the fields that two spaces alone do not settle; fields are paths or the ends of paths.

    take     field -> where it comes from: one field, or for a vector one for each number, by place or by path; None
             for a number that `fill` has
    fill     field -> its constant value
    keep     fields whose numbers stay as they are, though their bounds differ
    scale    fields whose numbers go from the one's bounds to the other's
    """

    take: Mapping[str, Taken] = field(default_factory=dict)
    fill: Mapping[str, float] = field(default_factory=dict)
    keep: Sequence[str] = ()
    scale: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A field that the spaces do not settle.

    why        what is not clear
    answers    choices that settle it, each by itself; none where rollflow has no piece for it
    """

    why: str
    answers: tuple[Answer, ...] = ()


class UnsettledFields(ConnectorError):
    """Raised where a policy does not fit an environment, and it is not clear how its fields would.

    changes      lines on what differs in the two
    questions    what is to be settled
    """

    def __init__(self, changes: Sequence[Any], questions: Sequence[Question]) -> None:
        self.changes, self.questions = tuple(changes), tuple(questions)
        super().__init__(self.text(_keywords))

    def text(self, written: Callable[[Answer], str]) -> str:
        """What differs, and what is open, with the answers as a function writes them."""
        lines = [f"  {change}" for change in self.changes]
        lines.append("these are open:")
        for question in self.questions:
            answers = " or ".join(map(written, question.answers)) or "connectors of your own that make it"
            lines.append(f"  {question.why}; expected {answers}")
        return "\n".join(["the policy does not fit the environment by itself:", *lines])


def _keywords(answer: Answer) -> str:
    option, name, value = answer
    return f"{option}={[name] if value is None else {name: value}}"


class Matching:
    """Finds an origin for every field of a space `target` in a space `source`.

        name       "observation" or "action", which paths begin with
        choices    those of both names
        used       gets the choices that are of use

    After construction `fields` has the origins, and `questions` what is open.
    """

    def __init__(self, name: str, source: Space, target: Space, choices: Choices, used: Used) -> None:
        self.fields: dict[str, Origin] = {}
        self.questions: list[Question] = []
        self._choices, self._used = choices, used
        self._unsettled: list[tuple[str, str, bool]] = []  # field, what differs, whether it can be scaled
        self._sources = {leaf.path: leaf for leaf in leaves_within(source, name)}
        self._numbers = numbers_within(self._sources.values())
        there = {leaf.path for leaf in leaves_within(target, name)}
        self._unused = [leaf for leaf in self._sources.values() if leaf.path not in there]
        self._match(target, source, name, name)

    def _match(self, target: Space, source: Space | None, path: str, at: str) -> None:
        """Match a part of the target with a part of the source, whose path is `at`; None: there is none."""
        if isinstance(target, spaces.Tuple):
            self._match_tuple(target, source.spaces if isinstance(source, spaces.Tuple) else (), path, at)
            return
        if isinstance(target, spaces.Dict):
            inner = source.spaces if isinstance(source, spaces.Dict) else {}
            for key, part in target.spaces.items():
                self._match(part, inner.get(key), f"{path}[{key!r}]", f"{at}[{key!r}]")
            return
        leaf = Leaf(path, (), target)
        taken = self._chosen("take", self._choices.take, path)
        partner = None if source is None else self._sources.get(at)
        if taken is not None and len(taken) == 1 and taken[0] is not None and leaf.size != 1:
            partner, taken = self._leaf_named(taken[0], path), None
        if partner is None and len(self._sources) == 1 and taken is not None:
            partner = next(iter(self._sources.values()))
        if taken is not None:
            self._take(leaf, partner, taken)
        elif partner is None:
            self._fill(leaf)
        else:
            self._pair(leaf, partner)

    def _match_tuple(self, target: Any, inner: Sequence[Space], path: str, at: str) -> None:
        """Match the parts of a Tuple: in the order in which they are alike, or by place where there are as many."""
        places, is_clear = _places([str(part) for part in target.spaces], [str(part) for part in inner])
        for number, (part, place) in enumerate(zip(target.spaces, places, strict=True)):
            own, theirs = f"{path}[{number}]", f"{at}[{place}]"
            if not is_clear and inner and not self._is_chosen(own):
                why = f"the parts of {at} do not say which of {len(inner)} is {own}"
                self.questions.append(Question(why, () if place is None else (("take", own, [theirs]),)))
            self._match(part, None if place is None else inner[place], own, theirs)

    def _pair(self, leaf: Leaf, partner: Leaf) -> None:
        """Match a leaf with the one that it is made of."""
        if leaf.space == partner.space:
            self.fields[leaf.path] = partner.path
        elif leaf.is_vector and partner.is_vector:
            self._pair_numbers(leaf, partner)
        elif leaf.shape != partner.shape:
            self.questions.append(
                Question(f"{leaf.path} has shape {list(leaf.shape)}, and comes with {list(partner.shape)}")
            )
        else:
            self._settle(leaf.path, leaf, partner.path, partner, leaf.bounds(), partner.bounds())
            self._ask_of_bounds(leaf)

    def _pair_numbers(self, leaf: Leaf, partner: Leaf) -> None:
        own, theirs = (list(zip(*each.bounds().tolist(), strict=True)) for each in (leaf, partner))
        places, is_clear = _places(own, theirs)
        if not is_clear and not all(map(self._is_chosen, leaf.numbers())):
            counts = f"which of {len(theirs)} numbers that come are its {len(own)}"
            why = f"the bounds of {leaf.path} do not say {counts}"
            self.questions.append(Question(why, (("take", leaf.path, places),)))
        taken = [None if self._is_filled(path) else place for path, place in zip(leaf.numbers(), places, strict=True)]
        self._take(leaf, partner, taken)

    def _take(self, leaf: Leaf, partner: Leaf | None, taken: Taken) -> None:
        paths = leaf.numbers()
        if len(taken) != len(paths) or not leaf.is_vector:
            raise ConnectorError(
                f"take of {leaf.path} has {len(taken)} parts, expected {leaf.size} numbers of a vector"
            )
        bounds = leaf.bounds()
        all_theirs: dict[str, Any] = {}  # path of a leaf -> its bounds, f64[2, size]
        for place, (path, each) in enumerate(zip(paths, taken, strict=True)):
            own = self._chosen("take", self._choices.take, path) if leaf.shape else None
            origin = each if own is None else own[0]
            if origin is None:
                self._fill(Leaf(path, (), _number_space(leaf, place)))
                continue
            found = self._number_named(origin, path, partner)
            leaf_of, at = self._numbers[found]
            if leaf_of.path not in all_theirs:
                all_theirs[leaf_of.path] = leaf_of.bounds()
            theirs = all_theirs[leaf_of.path][:, at : at + 1]
            self._settle(path, leaf, found, leaf_of, bounds[:, place : place + 1], theirs)
        self._ask_of_bounds(leaf)

    def _fill(self, leaf: Leaf) -> None:
        """Fill a field that nothing comes for, with the value that was chosen."""
        value = self._chosen("fill", self._choices.fill, leaf.path)
        if value is not None:
            low, high = leaf.bounds()
            if not ((low <= value) & (value <= high)).all():
                raise ConnectorError(f"fill of {leaf.path} is {value:g}, expected a value in {leaf.space}")
            self.fields[leaf.path] = float(value)
            return
        alike = [("take", leaf.path, [each.path]) for each in self._unused if each.space == leaf.space]
        low, high = leaf.bounds()
        value = max(float(low.max(initial=-np.inf)), min(0.0, float(high.min(initial=np.inf))))
        answers: Any = (*alike, ("fill", leaf.path, value))
        self.questions.append(Question(f"nothing comes for {leaf.path}, in {leaf.space}", answers))

    def _settle(self, path: str, leaf: Leaf, origin: str, source: Leaf, own: Any, theirs: Any) -> None:
        """Decide whether numbers are kept or scaled.

        own, theirs    bounds f64[2, n] of the field and of what comes for it
        """
        if _is_float(source) and not _is_float(leaf):
            self.questions.append(Question(f"{path} is in {leaf.space}, and {origin} in {source.space}"))
        elif np.array_equal(own, theirs) or self._chosen_flag("keep", self._choices.keep, path):
            if not _is_float(leaf) and not ((own[0] <= theirs[0]) & (theirs[1] <= own[1])).all():
                self.questions.append(Question(f"{path} is in {leaf.space}, and {origin} in {source.space}"))
            self.fields[path] = origin
        else:
            scaled = _scaled(own, theirs) if _is_float(leaf) else None
            if scaled is not None and self._chosen_flag("scale", self._choices.scale, path):
                self.fields[path] = [origin, *scaled]
                return
            why = f"{path} is to be within {_text(own)}, and {origin}, which comes for it, is within {_text(theirs)}"
            self._unsettled.append((path, why, scaled is not None))

    def _ask_of_bounds(self, leaf: Leaf) -> None:
        """Ask once for all numbers of a leaf that are to be kept or scaled."""
        unsettled, self._unsettled = self._unsettled, []
        if not unsettled:
            return
        path, why, _ = unsettled[0]
        if len(unsettled) > 1:
            path, why = leaf.path, f"{why}, and so on for {len(unsettled)} numbers"
        scales = all(each[2] for each in unsettled)
        answers: Any = (("keep", path, None), *([("scale", path, None)] if scales else []))
        self.questions.append(Question(why, answers))

    # Choices

    def _chosen(self, option: str, given: Mapping[str, Any], path: str) -> Any:
        for name, value in given.items():
            if _is_of(path, name):
                if self._used.setdefault((option, name), path) != path:
                    raise ConnectorError(
                        f"{option} of {name!r} may mean {self._used[option, name]} or {path}, expected one of them"
                    )
                return value
        return None

    def _chosen_flag(self, option: str, given: Iterable[str], path: str) -> bool:
        """True if a flag is given for a field, or for a part of the space that it lies in."""
        for name in given:
            if any(_is_of(path[:end], name) for end, letter in enumerate(f"{path}[") if letter == "["):
                self._used[option, name] = path
                return True
        return False

    def _is_chosen(self, path: str) -> bool:
        return any(_is_of(path, name) for name in (*self._choices.take, *self._choices.fill))

    def _is_filled(self, path: str) -> bool:
        return any(_is_of(path, name) for name in self._choices.fill)

    def _leaf_named(self, name: int | str, path: str) -> Leaf:
        found = [leaf for leaf in self._sources.values() if _is_of(leaf.path, str(name))]
        if len(found) != 1:
            raise ConnectorError(f"take of {path} is {name!r}, expected one of {', '.join(self._sources)}")
        return found[0]

    def _number_named(self, origin: int | str, path: str, partner: Leaf | None) -> str:
        if isinstance(origin, int):
            if partner is None or not 0 <= origin < partner.size:
                numbers = ", ".join(self._numbers if partner is None else partner.numbers())
                raise ConnectorError(f"take of {path} is {origin}, expected the place of one of {numbers}")
            return partner.number(origin)
        found = [number for number in self._numbers if _is_of(number, origin)]
        if len(found) != 1:
            raise ConnectorError(f"take of {path} is {origin!r}, expected one of {', '.join(self._numbers)}")
        return found[0]


def _is_of(path: str, name: str) -> bool:
    """True if a name is a path, or the end of one, such as `speed` or `state[2]`."""
    key, bracket, rest = name.partition("[")
    return path == name or (bool(key) and path.endswith(f"[{key!r}]{bracket}{rest}"))


def _places(own: list[Any], theirs: list[Any]) -> tuple[list[int | None], bool]:
    """The place in `theirs` of each of some bounds, None for one that went; False where the bounds do not say so."""
    by_place: list[int | None] = [place if place < len(theirs) else None for place in range(len(own))]
    if own == theirs or (len(own) == len(theirs) and sorted(own) != sorted(theirs)):
        return by_place, True
    left = list(range(len(theirs)))
    places: list[int | None] = []
    for bounds in own:
        places.append(next((place for place in left if theirs[place] == bounds), None))
        left = [place for place in left if place != places[-1]]
    fewer, more = (own, theirs) if len(own) <= len(theirs) else (theirs, own)
    is_clear = all(fewer.count(each) == more.count(each) == 1 for each in fewer)
    all_found = sum(place is not None for place in places) == len(fewer)
    return (places if all_found else by_place), is_clear


def _number_space(leaf: Leaf, place: int) -> Space:
    """The space of one number of a vector."""
    low, high = leaf.bounds()[:, place].tolist()
    if not leaf.shape:
        return leaf.space
    if isinstance(leaf.space, spaces.Box):
        return spaces.Box(low, high, (), leaf.space.dtype.type)
    return spaces.Discrete(int(high - low) + 1, start=int(low))


def _scaled(own: Any, theirs: Any) -> tuple[float, float] | None:
    """(factor, offset) from the bounds `theirs` to `own`, f64[2, n] both; None where there is none for all numbers."""
    ends = np.concatenate([own, theirs])
    if not np.isfinite(ends).all() or (ends != ends[:, :1]).any() or not (theirs[1] > theirs[0]).all():
        return None
    factor = float((own[1, 0] - own[0, 0]) / (theirs[1, 0] - theirs[0, 0]))
    return factor, float(own[0, 0] - theirs[0, 0] * factor)


def _is_float(leaf: Leaf) -> bool:
    return np.dtype(leaf.space.dtype).kind == "f"


def _text(bounds: Any) -> str:
    return f"{bounds[0].min():.6g} … {bounds[1].max():.6g}"
