"""Number of examples of a property test, by the hypothesis profile in use."""

import hypothesis

# Profiles that draw the same examples in every run draw one in so many.
SHARES = {"random": 1, "quick": 4}


def examples(count: int, *, quick: int | None = None) -> int:
    """The number of examples to draw: `count` under the random profile, and fewer under the others, at least one.

    quick    under the quick profile; None: a share of `count`
    """
    profile = hypothesis.settings.get_current_profile_name()
    return quick if quick is not None and profile == "quick" else max(1, count // SHARES.get(profile, 2))
