"""Packages of the extra `test-all`, which README's test command does without."""

import importlib
import os
from typing import Any

import pytest


def needs(*packages: str) -> Any:
    """The first of these packages. The test, or the file, is skipped where one is missing; `.ci/run` fails then."""
    try:
        modules = [importlib.import_module(each) for each in packages]
    except ModuleNotFoundError as error:
        if os.environ.get("ROLLFLOW_TEST_ALL"):
            raise
        reason = f"{error.name} needs the extra test-all: pip install -c constraints.txt -e '.[test-all]'"
        pytest.skip(reason, allow_module_level=True)
    return modules[0]
