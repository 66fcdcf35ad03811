"""Number of examples of a property test, by the hypothesis profile in use."""

import hypothesis

RANDOM_TIMES = 2  # as many examples under the profile "random" as under "fixed"


def examples(count: int) -> int:
    """The number of examples to draw: `count` under the fixed profile, and more under the random one."""
    return count * RANDOM_TIMES if hypothesis.settings.get_current_profile_name() == "random" else count
