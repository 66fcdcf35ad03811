"""Names that programs may import from a package in whose `__all__` they are not: pieces, and those of `rollflow`."""

import importlib

import rollflow

HOMES = (  # of pieces, and of names that go with them, which `rollflow.nodes` gives
    "rollflow.nodes.connectors.common.batches",
    "rollflow.nodes.connectors.common.episode_columns",
    "rollflow.nodes.connectors.env_to_module.observation_pieces",
    "rollflow.nodes.connectors.learner.train_columns",
    "rollflow.nodes.connectors.module_to_env.action_pieces",
    "rollflow.nodes.modules.distribution",
    "rollflow.nodes.modules.given_module",
)


def home_of(package: str, name: str) -> str | None:
    """The module that has a name which is not public in a package; None: none has it. Those of `rollflow` are there."""
    if package != "rollflow" and name in rollflow.__all__:
        return "rollflow"
    for home in HOMES if package == "rollflow.nodes" and name[0].isupper() else ():
        found = vars(importlib.import_module(home)).get(name)
        if found is not None and getattr(found, "__module__", home) == home:
            return home
    return None
