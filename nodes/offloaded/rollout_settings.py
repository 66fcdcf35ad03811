"""Settings of a rollout for its hosts, checked where they come in: they are somebody else's."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.modules.default_model_config import model_config_of
from rollflow.nodes.modules.default_module import DefaultModule
from rollflow.nodes.offloaded.replica import PIPELINES, Replica
from rollflow.stream.data.errors import ColumnError, ConnectorError, ModuleError, WireError, shown
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.wire import Settings

_MOST_ROWS, _MOST_SEED, _MOST_THREADS = 1 << 24, 1 << 64, 1024


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings that every host of a rollout is told.

    fragment_length           vector steps in a fragment (T)
    lookback                  steps of the fragment before in each (H)
    seed                      of environments and sampling
    explore, flat, threads    how forward passes are done: see `ModuleForward`; of several modules `explore` is by id
    module                    name of the module's class; of several modules a map of them by id
    model_config              fields of its `DefaultModelConfig`; None: it is no `DefaultModule`; likewise by id
    pieces                    names of each pipeline's connector pieces
    """

    fragment_length: int
    lookback: int
    seed: int
    explore: bool | Mapping[str, bool]
    flat: bool | None
    threads: int | None
    module: str | Mapping[str, str]
    model_config: Mapping[str, Any] | None
    pieces: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, replica: Replica, acting: Mapping[str, Any], *, has_several: bool, **sizes: int) -> "RolloutSettings":
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
            module=names if has_several else names[DEFAULT_MODULE_ID],
            model_config=configs if has_several else configs[DEFAULT_MODULE_ID],
            pieces={name: [piece.name for piece in pipeline.connectors] for name, pipeline in replica.named_pipelines},
            **sizes,
        )

    def message(self) -> Settings:
        """As it goes over the wire."""
        return Settings(asdict(self))

    @classmethod
    def of_message(cls, message: Settings) -> "RolloutSettings":
        """As it came over the wire. Raises WireError where it is something else."""
        settings = message.settings
        missing = [field.name for field in fields(cls) if field.name not in settings and field.default is MISSING]
        if missing:
            raise WireError(f"settings: no {', '.join(missing)}, expected {', '.join(f.name for f in fields(cls))}")
        made = cls(**{field.name: settings[field.name] for field in fields(cls) if field.name in settings})
        made._check()
        return made

    @property
    def modules(self) -> Mapping[str, tuple[str, Mapping[str, Any] | None]]:
        """Module id -> name of its class, and its config, None where it is no `DefaultModule`."""
        if isinstance(self.module, str):
            return {DEFAULT_MODULE_ID: (self.module, self.model_config)}
        configs = self.model_config or {}
        return {module_id: (name, configs[module_id]) for module_id, name in self.module.items()}

    def check_pieces(self, pipelines: Sequence[tuple[str, Any]], name: str) -> None:
        """Raise ConnectorError where a host's pipelines have other pieces than the rollout's."""
        mine = {which: [piece.name for piece in pipeline.connectors] for which, pipeline in pipelines}
        for which in dict.fromkeys([*self.pieces, *mine]):
            theirs = list(self.pieces.get(which, ()))
            if mine.get(which, []) != theirs:
                raise ConnectorError(
                    f"the {which} pipeline of host {name} is {', '.join(mine.get(which, [])) or 'empty'}; expected "
                    f"that of the rollout: {', '.join(theirs) or 'an empty one'}"
                )

    def check_given(self, modules: Mapping[str, Any], name: str) -> None:
        """Raise ModuleError where a host was given other modules, or none, and the rollout has some of its own."""
        if modules.keys() != self.modules.keys():
            raise ModuleError(
                f"host {name} has the modules {sorted(modules)}, expected those of the rollout: {sorted(self.modules)}"
            )
        for module_id, (kind, config) in self.modules.items():
            if modules[module_id] is None and config is None:
                raise ModuleError(
                    f"the rollout's {self._named(module_id)} is {kind}, and host {name} was given none, "
                    "expected the same"
                )

    def check_modules(self, modules: Mapping[str, Any], name: str) -> None:
        """Raise ModuleError where a host's modules are of other classes than the rollout's."""
        for module_id, (kind, _) in self.modules.items():
            if type(modules[module_id]).__name__ != kind:
                raise ModuleError(
                    f"the {self._named(module_id)} of host {name} is {type(modules[module_id]).__name__}; expected "
                    f"that of the rollout: {kind}"
                )

    def _named(self, module_id: str) -> str:
        return "module" if isinstance(self.module, str) else f"module '{module_id}'"

    def _check(self) -> None:
        for name, value, least, most in (
            ("fragment_length", self.fragment_length, 1, _MOST_ROWS),
            ("lookback", self.lookback, 0, _MOST_ROWS),
            ("seed", self.seed, 0, _MOST_SEED),
            ("threads", 1 if self.threads is None else self.threads, 1, _MOST_THREADS),
        ):
            if not is_whole(value) or not least <= value <= most:
                raise WireError(f"settings: {name} is {shown(value)}, expected a whole number from {least} to {most}")
        for name, flags in (("explore", self.explore), ("flat", self.flat)):
            may_be_none = name == "flat" and not isinstance(self.module, str)
            each = flags.values() if name == "explore" and isinstance(flags, Mapping) else [flags]
            if not all(isinstance(flag, bool) or (may_be_none and flag is None) for flag in each):
                raise WireError(f"settings: {name} is {shown(flags)}, expected a bool")
        if isinstance(self.module, Mapping):
            configs = self.model_config
            if not self.module or not _is_names([*self.module, *self.module.values()]):
                raise WireError(f"settings: module is {shown(self.module)}, expected names by ids")
            if not isinstance(configs, Mapping) or configs.keys() != self.module.keys():
                raise WireError(f"settings: model_config is {shown(configs)}, expected one for each module")
        elif not isinstance(self.module, str):
            raise WireError(f"settings: module is {shown(self.module)}, expected a name")
        for _, config in self.modules.values():
            if config is not None:
                try:
                    model_config_of(config)
                except (ValueError, TypeError, ColumnError) as error:
                    raise WireError(f"settings: {error}") from error
        if not isinstance(self.pieces, Mapping) or not all(map(_is_names, self.pieces.values())):
            raise WireError(f"settings: pieces is {shown(self.pieces)}, expected lists of names by pipeline")
        if isinstance(self.module, str) and not self.pieces.keys() >= set(PIPELINES):
            raise WireError(f"settings: pieces is {shown(self.pieces)}, expected lists of names for {PIPELINES}")


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
