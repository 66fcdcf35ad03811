"""Plays of several agents that our episodes and Ray's take alike."""

from drawn_turns import Told, turns


def has_heir(told: Told) -> bool:
    """Return True where an agent enters in the env step that ends all others: there the two differ, as told below."""
    live: set[str] = set()
    for step in told.steps:
        before = set(live)
        live |= step["observations"].keys()
        live -= {*step["terminateds"], *step["truncateds"]}
        if before and live and not live & before:
            return True
    return False


def has_repeat(told: Told) -> bool:
    """Return True where an agent ends without an observation: Ray repeats the one before, one env step too late."""
    return any(step["terminateds"].keys() - step["observations"].keys() for step in told.steps)


plays = turns().filter(lambda told: not has_heir(told))
observed_plays = plays.filter(lambda told: not has_repeat(told))
