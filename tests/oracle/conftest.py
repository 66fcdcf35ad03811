import importlib.util

import hypothesis

# These tests hold rollflow against Ray, which lives in an environment of its own: see CONTRIBUTING.md.
if importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # How long an example takes says nothing of whether it is right.
    hypothesis.settings.register_profile("oracle", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("oracle")
