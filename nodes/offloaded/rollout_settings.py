"""Settings of a rollout for its hosts, checked where they come in: they are somebody else's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from rollflow.nodes.modules.default_module import DefaultModule, model_config_of
from rollflow.nodes.offloaded.lane_rollout import Replica
from rollflow.stream.data.errors import ColumnError, ConnectorError, ModuleError, WireError, shown
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.wire import Settings
from rollflow.stream.wire.codec import field

_MOST_ROWS = 1 << 24
_NAME = field.text(1024)


def _flags(value: Any, where: str) -> Any:
    """A flag, or one for each module."""
    return (field.map_of(field.flag) if isinstance(value, Mapping) else field.flag)(value, where)


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings that every host of a rollout is told.

    fragment_length           vector steps in a fragment (T)
    lookback                  steps of the fragment before in each (H)
    seed                      of environments and sampling
    explore, flat, threads    how forward passes are done: see `ModuleForward`; of several modules `explore` is by id
    module                    module id -> name of the module's class
    model_config              module id -> fields of its `DefaultModelConfig`; None: it is no `DefaultModule`
    pieces                    names of each pipeline's connector pieces
    """

    fragment_length: Annotated[int, field.whole(1, _MOST_ROWS)]
    lookback: Annotated[int, field.whole(0, _MOST_ROWS)]
    seed: Annotated[int, field.whole(0, 1 << 64)]
    explore: Annotated[bool | Mapping[str, bool], _flags]
    flat: Annotated[bool | None, field.nullable(field.flag)]
    threads: Annotated[int | None, field.nullable(field.whole(1, 1024))]
    module: Annotated[Mapping[str, str], field.map_of(_NAME)]
    model_config: Annotated[Mapping[str, Any], field.map_of(field.nullable(field.mapping))]
    pieces: Annotated[Mapping[str, Sequence[str]], field.map_of(field.list_of(_NAME, 1024))]

    @classmethod
    def of(cls, replica: Replica, acting: Mapping[str, Any], **sizes: int) -> "RolloutSettings":
        """Settings of a rollout: what acts, options of forward passes, and the numbers."""
        names = {each: type(module).__name__ for each, module in replica.modules.items()}
        configs = {
            each: asdict(model_config_of(module.model_config)) if type(module) is DefaultModule else None
            for each, module in replica.modules.items()
        }
        return cls(
            explore=acting["explore"],
            flat=acting["flat"],
            threads=acting["threads"],
            module=names,
            model_config=configs,
            pieces={name: [piece.name for piece in pipeline.connectors] for name, pipeline in replica.named_pipelines},
            **sizes,
        )

    def message(self) -> Settings:
        """As it goes over the wire."""
        return Settings(asdict(self))

    @classmethod
    def of_message(cls, message: Settings) -> "RolloutSettings":
        """As it came over the wire. Raises WireError where it is something else."""
        made = cls(**field.checked_fields(cls, message.settings, "settings"))
        if not made.module:
            raise WireError("settings.module is {}, expected names by ids")
        if made.model_config.keys() != made.module.keys():
            raise WireError(f"settings.model_config is {shown(made.model_config)}, expected one for each module")
        for config in made.model_config.values():
            if config is not None:
                try:
                    model_config_of(config)
                except (ValueError, TypeError, ColumnError) as error:
                    raise WireError(f"settings.model_config: {error}") from error
        return made

    def check(self, replica: Replica, name: str) -> None:
        """Raise ModuleError or ConnectorError where a host's modules or pieces are others than the rollout's."""
        for module_id, kind in self.module.items():
            if type(replica.modules[module_id]).__name__ != kind:
                raise ModuleError(
                    f"the {self._named(module_id)} of host {name} is {type(replica.modules[module_id]).__name__}; "
                    f"expected that of the rollout: {kind}"
                )
        mine = {which: [piece.name for piece in pipeline.connectors] for which, pipeline in replica.named_pipelines}
        for which in dict.fromkeys([*self.pieces, *mine]):
            theirs = list(self.pieces.get(which, ()))
            if mine.get(which, []) != theirs:
                raise ConnectorError(
                    f"the {which} pipeline of host {name} is {', '.join(mine.get(which, [])) or 'empty'}; expected "
                    f"that of the rollout: {', '.join(theirs) or 'an empty one'}"
                )

    def check_given(self, modules: Mapping[str, Any], name: str) -> None:
        """Raise ModuleError where a host was given other modules, or none, and the rollout has some of its own."""
        if modules.keys() != self.module.keys():
            raise ModuleError(
                f"host {name} has the modules {sorted(modules)}, expected those of the rollout: {sorted(self.module)}"
            )
        for module_id, kind in self.module.items():
            if modules[module_id] is None and self.model_config[module_id] is None:
                raise ModuleError(
                    f"the rollout's {self._named(module_id)} is {kind}, and host {name} was given none, "
                    "expected the same"
                )

    def _named(self, module_id: str) -> str:
        return "module" if self.module.keys() == {DEFAULT_MODULE_ID} else f"module '{module_id}'"
