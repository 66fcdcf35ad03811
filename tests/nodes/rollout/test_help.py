"""`help()` of a rollout."""

import inspect
import pydoc
import re
from typing import Any

import pytest
from numbered_agents import NumberedAgents
from numbered_env import numbered_envs

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes import RandomModule


def single() -> Rollout:
    return Rollout(numbered_envs(1)[1])


def several() -> MultiAgentRollout:
    return MultiAgentRollout(lambda: NumberedAgents(0, nested=0), module=RandomModule)


@pytest.mark.parametrize("make", [single, several])
def test_help_names_every_public_attribute_and_says_what_every_method_does(make: Any) -> None:
    rollout = make()
    said = inspect.getdoc(type(rollout)) or ""
    attributes = {name for name in vars(rollout) if not name.startswith("_")}
    properties = {name for name, kind in inspect.getmembers(type(rollout)) if isinstance(kind, property)}
    named = set(re.findall(r"\w+", said))
    assert {name for name in attributes | properties if not name.startswith("_")} <= named
    shown = pydoc.plain(pydoc.render_doc(type(rollout)))
    methods = [name for name, _ in inspect.getmembers(type(rollout), inspect.isfunction) if not name.startswith("_")]
    for name in (*methods, *properties):
        assert inspect.getdoc(getattr(type(rollout), name)), name
        assert re.search(rf"^ \|  (async )?{name}\b", shown, re.MULTILINE), name
    for name in ("publish", "batches", "fragments", "start", "drain", "close", "report", "explain", "graph"):
        assert f"`{name}" in said
    rollout.close()


@pytest.mark.parametrize("kind", [Rollout, MultiAgentRollout])
def test_help_explains_every_argument(kind: Any) -> None:
    named = set(re.findall(r"\w+", inspect.getdoc(kind) or ""))
    assert set(inspect.signature(kind).parameters) <= named


@pytest.mark.parametrize("kind", [Rollout, MultiAgentRollout])
def test_a_subclass_has_the_signature_of_its_own_arguments_or_of_those_it_inherits(kind: Any) -> None:
    class Inherits(kind):
        """With nothing of its own."""

    class Renames(kind):
        def __init__(self, name: str) -> None:
            """Take a name."""

    given = inspect.signature(kind).parameters
    assert next(iter(given)) == "env"
    assert given["env"].annotation is not inspect.Parameter.empty
    assert {"num_envs", "watch"} <= set(given)
    assert inspect.signature(Inherits) == inspect.signature(kind)
    assert list(inspect.signature(Renames).parameters) == ["name"]
    assert list(inspect.signature(kind.__init__).parameters) == ["self", *given]
