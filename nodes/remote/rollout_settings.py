"""What a rollout host has to know of the rollout, checked where it comes in: it is somebody else who says it."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from rollflow.nodes.default_model_config import model_config_of
from rollflow.nodes.default_module import DefaultModule
from rollflow.nodes.env_source import is_whole
from rollflow.stream.errors import ColumnError, ConnectorError, ModuleError, WireError
from rollflow.stream.wire import Settings

_MOST_ROWS, _MOST_SEED, _MOST_THREADS = 1 << 24, 1 << 64, 1024
PIPELINES = ("env_to_module", "module_to_env")


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What every host of a rollout is told.

    fragment_length           vector steps in a fragment (T)
    lookback                  steps of the fragment before in each (H)
    seed                      of environments and sampling
    explore, flat, threads    how forward passes are done: see `ModuleForward`
    module                    name of the module's class
    model_config              fields of its `DefaultModelConfig`; None: it is no `DefaultModule`
    pieces                    names of each pipeline's connector pieces
    digests                   whether weights are digested when they have been loaded; not said by older software
    """

    fragment_length: int
    lookback: int
    seed: int
    explore: bool
    flat: bool
    threads: int | None
    module: str
    model_config: Mapping[str, Any] | None
    pieces: Mapping[str, Sequence[str]]
    digests: bool = False

    @classmethod
    def of(
        cls, replica: Mapping[str, Any], acting: Mapping[str, Any], *, digests: bool, **sizes: int
    ) -> "RolloutSettings":
        """Those of a rollout: what is needed elsewhere, how forward passes are done, and the numbers."""
        module = replica["module"]
        return cls(
            explore=acting["explore"],
            flat=acting["flat"],
            threads=acting["threads"],
            module=type(module).__name__,
            model_config=asdict(model_config_of(module.model_config)) if type(module) is DefaultModule else None,
            pieces={name: [piece.name for piece in replica[name].connectors] for name in PIPELINES},
            digests=digests,
            **sizes,
        )

    def message(self) -> Settings:
        """As it goes over the wire."""
        return Settings(asdict(self))

    @classmethod
    def of_message(cls, message: Settings) -> "RolloutSettings":
        """As it came over the wire. Raises WireError where it is something else."""
        told = message.settings
        missing = [field.name for field in fields(cls) if field.name not in told and field.default is MISSING]
        if missing:
            raise WireError(f"settings: no {', '.join(missing)}, expected {', '.join(f.name for f in fields(cls))}")
        made = cls(**{field.name: told[field.name] for field in fields(cls) if field.name in told})
        made._check()
        return made

    def check_pieces(self, pipelines: Mapping[str, Any], name: str) -> None:
        """Raise ConnectorError where a host's pipelines have other pieces than the rollout's."""
        for which in PIPELINES:
            mine, theirs = [piece.name for piece in pipelines[which].connectors], list(self.pieces[which])
            if mine != theirs:
                raise ConnectorError(
                    f"the {which} pipeline of host {name} is {', '.join(mine)}; expected that of the rollout: "
                    f"{', '.join(theirs)}"
                )

    def check_given(self, module: Any, name: str) -> None:
        """Raise ModuleError where a host was given no module, and the rollout has one of its own."""
        if module is None and self.model_config is None:
            raise ModuleError(
                f"the rollout's module is {self.module}, and host {name} was given none, expected the same"
            )

    def check_module(self, module: Any, name: str) -> None:
        """Raise ModuleError where a host's module is of another class than the rollout's."""
        if type(module).__name__ != self.module:
            raise ModuleError(
                f"the module of host {name} is {type(module).__name__}; expected that of the rollout: {self.module}"
            )

    def _check(self) -> None:
        for name, value, least, most in (
            ("fragment_length", self.fragment_length, 1, _MOST_ROWS),
            ("lookback", self.lookback, 0, _MOST_ROWS),
            ("seed", self.seed, 0, _MOST_SEED),
            ("threads", 1 if self.threads is None else self.threads, 1, _MOST_THREADS),
        ):
            if not is_whole(value) or not least <= value <= most:
                raise WireError(f"settings: {name} is {value!r:.100}, expected a whole number from {least} to {most}")
        for name, flag in (("explore", self.explore), ("flat", self.flat), ("digests", self.digests)):
            if not isinstance(flag, bool):
                raise WireError(f"settings: {name} is {flag!r:.100}, expected a bool")
        if not isinstance(self.module, str):
            raise WireError(f"settings: module is {self.module!r:.100}, expected a name")
        if self.model_config is not None:
            try:
                model_config_of(self.model_config)
            except (ValueError, TypeError, ColumnError) as error:
                raise WireError(f"settings: {error}") from error
        if not isinstance(self.pieces, Mapping) or not all(_is_names(self.pieces.get(name)) for name in PIPELINES):
            raise WireError(f"settings: pieces is {self.pieces!r:.100}, expected lists of names for {PIPELINES}")


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
