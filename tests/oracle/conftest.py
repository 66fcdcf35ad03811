import gc
import importlib.util
import sys

import hypothesis

# These tests hold rollflow against Ray, which lives in an environment of its own: see CONTRIBUTING.md.
if importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # How long an example takes says nothing of whether it is right.
    hypothesis.settings.register_profile("oracle", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("oracle")


def pytest_collection_finish() -> None:
    """Have torch use one thread, and keep what Ray has made out of later garbage collections: see tests/conftest.py."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
