"""Diagnosis: what a run waits for, as fields and as text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollflow.stream.data.errors import HELP_PAGES
from rollflow.stream.observe.stacks import StackFrame, stack_lines
from rollflow.stream.observe.waits import CALLER, Look, Sign, Wait, Way

_REMEDIES = {
    "call": "look at the line above: it has to return; on_stall='raise' breaks off what the main thread is in alone",
    "works": "nothing: it works. prefetch=1 lets the environments step meanwhile",
    "holds back": "nothing here: look at the trainer",
    "away": "start it, or look at its address and its log",
    "lost": "look at the warning in the log that says why it was lost",
    "waits": "look at what it waits for; nothing in this graph would end that wait",
}
_DEADLOCK = "give one of these edges more capacity, or have a node take items before it sends"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a run waits for at one time. `str(diagnosis)` is the text.

    state       "flows", "waits" for less than what a stall takes, "stalled", "caller works", or "not running"
    noun        word for what leaves the graph
    waited_s    seconds for which nothing has left while a consumer waits
    way         parties from the consumer to the final blocker; empty: nobody waits
    stood_s     seconds for which the final blocker has not got on
    is_closed   whether the way is closed: a deadlock
    stack       of the blocker's thread, innermost call first; empty: not known
    caller_s    seconds for which the caller has had each of its last items
    notes       silent faults, in words: what flows, and can't be right
    parties     what every party does
    """

    state: str
    noun: str = "item"
    waited_s: float = 0.0
    way: tuple[Wait, ...] = ()
    stood_s: float = 0.0
    is_closed: bool = False
    stack: tuple[StackFrame, ...] = ()
    caller_s: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    parties: tuple[Wait, ...] = field(default=(), repr=False)

    @property
    def blocker(self) -> Wait | None:
        """The party that all others wait for; None: there is none."""
        return self.way[-1] if self.way else None

    @property
    def remedy(self) -> str:
        """What to change, and where that is described."""
        blocker = self.blocker
        if blocker is None:
            return ""
        if self.is_closed:
            text = next((wait.remedy for wait in self.way if wait.remedy), _DEADLOCK)
        else:
            text = blocker.remedy or _REMEDIES[blocker.kind]
        return f"{text}; see docs/{HELP_PAGES['stall']}"

    def __str__(self) -> str:
        lines = [self._first_line(), *self.notes]
        if self.state in ("stalled", "waits"):
            lines += [*stack_lines(self.stack), f"do: {self.remedy}"]
        return "\n".join(lines)

    def _first_line(self) -> str:
        blocker = self.blocker
        if self.state == "caller works" and (blocker is None or blocker.party == CALLER):
            usual = f" (the median was {median(self.caller_s):.1f} s)" if self.caller_s else ""
            return f"the caller works: it has had its {self.noun} for {self.stood_s:.1f} s{usual}"
        if blocker is None:
            return {"not running": "it is not running"}.get(self.state, f"it flows: nobody waits for {_a(self.noun)}")
        begin = f"no {self.noun} for {self.waited_s:.1f} s: "
        if self.is_closed:
            edges = "; ".join(f"{wait.name} {wait.doing}" for wait in self.way if not wait.is_part)
            return f"{begin}deadlock: {edges}"
        text = f"{begin}{blocker.name} {blocker.doing} since {self.stood_s:.1f} s"
        others = list(dict.fromkeys(wait.party for wait in self.way[:-1] if not wait.is_part))
        return f"{text}; {_listed(others)} for it" if others and blocker.kind != "works" else text


def diagnosed(
    look: Look | None, way: Way | None, waited_s: float, stood_s: float, signs: Iterable[Sign], *, is_stalled: bool
) -> Diagnosis:
    """The diagnosis of a look, with the way from its consumer if one waits, and the silent faults found last."""
    if look is None:
        return Diagnosis("not running")
    state, caller = "flows", look.waits.get(CALLER)
    if way is not None:
        state = "stalled" if is_stalled else "caller works" if way.blocker.party == CALLER else "waits"
    elif caller is not None and caller.kind == "works" and caller.calls:
        state, stood_s = "caller works", caller.age_s
    return Diagnosis(
        state,
        look.noun,
        waited_s,
        () if way is None else way.waits,
        stood_s,
        way is not None and way.is_closed,
        () if way is None else way.blocker.stack(),
        look.caller,
        tuple(sign.text for sign in signs),
        tuple(look.waits.values()),
    )


def _listed(names: list[str]) -> str:
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{text} {'waits' if len(names) == 1 else 'wait'}"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def median(seconds: Sequence[float]) -> float:
    """The middle one; 0 where there is none."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] if ordered else 0.0
