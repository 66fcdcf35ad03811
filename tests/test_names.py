"""Public names: where programs import them from, and what keeps old imports working."""

import importlib

import pytest

import rollflow

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
    for name in rollflow.__all__:
        assert getattr(module, name) is getattr(rollflow, name)
        assert name not in module.__all__


def test_pieces_of_pipelines_are_found_beside_the_public_ones() -> None:
    from rollflow.nodes import DEFAULT_MODULE_ID, Categorical, GetActions, NumpyToTensor

    names = (DEFAULT_MODULE_ID, Categorical.__name__, GetActions.__name__, NumpyToTensor.__name__)
    assert names == ("default_policy", "Categorical", "GetActions", "NumpyToTensor")
    for name in ("Any", "Tree", "np", "Rolout"):
        assert not hasattr(rollflow.nodes, name)


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"'rollflow' has no attribute 'Rolout'"):
        rollflow.Rolout  # noqa: B018
