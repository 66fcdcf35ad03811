"""Property tests: how many examples they draw, by the hypothesis profile in use, and the settings that they draw."""

from typing import Any

import hypothesis
from hypothesis import strategies as st

# Profiles that draw the same examples in every run draw one in so many.
SHARES = {"random": 1, "quick": 4}


def examples(count: int, *, quick: int | None = None) -> int:
    """The number of examples to draw: `count` under the random profile, and fewer under the others, at least one.

    quick    under the quick profile; None: a share of `count`
    """
    profile = hypothesis.settings.get_current_profile_name()
    return quick if quick is not None and profile == "quick" else max(1, count // SHARES.get(profile, 2))


def strategies(**settings: Any) -> dict[str, st.SearchStrategy[Any]]:
    """Strategies by name: whole numbers from one to another for a pair, one of a list, True or False for `bool`."""

    def strategy_of(drawn: Any) -> st.SearchStrategy[Any]:
        if isinstance(drawn, tuple):
            return st.integers(*drawn)
        return st.booleans() if drawn is bool else st.sampled_from(drawn) if isinstance(drawn, list) else drawn

    return {name: strategy_of(drawn) for name, drawn in settings.items()}
