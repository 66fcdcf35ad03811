"""Records of the runs that have written to a dataset: what made the steps, with which versions of packages."""

import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata as packages
from typing import Any

from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.rollout.rollout import Rollout
from rollflow.stream.data.errors import DatasetError

AnyRollout = Rollout | MultiAgentRollout
_PACKAGES = ("gymnasium", "numpy", "pyarrow", "rollflow", "torch")


def run_record(metadata: Mapping[str, Any], rollout: AnyRollout | None) -> dict[str, Any]:
    """The record of a run, in JSON's types: a user's values, the rollout, and the versions of Python and packages."""
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}
    described = None if rollout is None else _described(rollout)
    return {"metadata": dict(metadata), "rollout": described, "versions": versions}


@cache
def version_of(package: str) -> str:
    """The version of an installed package; "unknown" for one that is only on the path."""
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:
        return "unknown"


def checked_rollout(rollout: Any) -> AnyRollout | None:
    """Return a rollout, or None. Raises DatasetError for anything else."""
    if rollout is not None and not isinstance(rollout, AnyRollout):
        raise DatasetError(f"rollout is a {type(rollout).__name__}, expected a rollout, or None").see("dataset")
    return rollout


def _described(rollout: AnyRollout) -> dict[str, Any]:
    """Id of the environment if it is known, its keywords, seed, and names of the classes of modules and pieces."""
    env = rollout.environments.envs[0]
    spec = getattr(env, "spec", None) or getattr(next(iter(getattr(env, "envs", ())), None), "spec", None)
    described = {"env": None if spec is None else spec.id, "seed": rollout.seed}
    if isinstance(rollout, Rollout):
        if rollout.env_kwargs:
            described["env_kwargs"] = {name: _plain(value) for name, value in rollout.env_kwargs.items()}
        return described | {
            "module": _name_of(rollout.module),
            "env_to_module": _pieces_of(rollout.env_to_module),
            "module_to_env": _pieces_of(rollout.module_to_env),
        }
    return described | {
        "module": {str(module_id): _name_of(module) for module_id, module in rollout.module.items()},
        "env_to_module": [_pieces_of(each) for each in rollout.env_to_module],
        "module_to_env": [_pieces_of(each) for each in rollout.module_to_env],
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _pieces_of(pipeline: ConnectorPipelineV2) -> list[str]:
    return [_name_of(piece) for piece in pipeline.connectors]


def _name_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
