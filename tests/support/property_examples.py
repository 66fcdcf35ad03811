"""Number of examples of a property test, by the hypothesis profile in use."""

import hypothesis

FIXED_SHARE = 2  # the profile "fixed", which draws the same examples in every run, draws one in so many


def examples(count: int) -> int:
    """The number of examples to draw: `count` under the random profile, and fewer under the fixed one, at least one."""
    return count if hypothesis.settings.get_current_profile_name() == "random" else max(1, count // FIXED_SHARE)
