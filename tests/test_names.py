"""Public names: where programs import them from, and what keeps old imports working."""

import importlib

import pytest

import rollflow
from rollflow.aliases import ALIASES

PACKAGES = ("rollflow", "rollflow.nodes", "rollflow.policy", "rollflow.sinks", "rollflow.stream")


@pytest.mark.parametrize("package", [*PACKAGES, "rollflow.policy.serving"])
def test_every_public_name_is_found(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    assert all(hasattr(module, name) for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))


def test_a_name_is_public_in_one_package() -> None:
    names = [name for package in PACKAGES for name in importlib.import_module(package).__all__]
    assert len(names) == len(set(names)) <= 120


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_names_that_a_package_had_before_are_still_found_there(package: str) -> None:
    module = importlib.import_module(package)
    for home, names in {"rollflow": rollflow.__all__, **ALIASES.get(package, {})}.items():
        for name in names:
            assert getattr(module, name) is getattr(importlib.import_module(home), name)
            assert name not in module.__all__


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"'rollflow' has no attribute 'Rolout'"):
        rollflow.Rolout  # noqa: B018
