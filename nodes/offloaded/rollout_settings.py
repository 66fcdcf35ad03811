"""Settings of a rollout for its hosts, and what they report of its lanes, checked where it comes in."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.env.observation_check import KINDS
from rollflow.nodes.modules.default_module import DefaultModule, model_config_of
from rollflow.nodes.offloaded.fragment_checks import MOST
from rollflow.nodes.offloaded.lane_rollout import AnyActing
from rollflow.stream.data.errors import ColumnError, ConnectorError, ModuleError, WireError, shown
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.wire import Settings
from rollflow.stream.wire.codec import field

_MOST_ROWS = 1 << 24
_LINE = field.text(1024)  # a name, or a text that is logged
_COUNT = field.whole(0, MOST)
_Count = Annotated[int, _COUNT]


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
    module: Annotated[Mapping[str, str], field.map_of(_LINE)]
    model_config: Annotated[Mapping[str, Any], field.map_of(field.nullable(field.mapping))]
    pieces: Annotated[Mapping[str, Sequence[str]], field.map_of(field.list_of(_LINE, 1024))]

    @classmethod
    def of(cls, acting: AnyActing, how: Mapping[str, Any], **sizes: int) -> "RolloutSettings":
        """Settings of a rollout: what acts, options of forward passes, and the numbers."""
        names = {each: type(module).__name__ for each, (module, _) in acting.by_id.items()}
        configs = {
            each: asdict(model_config_of(module.model_config)) if type(module) is DefaultModule else None
            for each, (module, _) in acting.by_id.items()
        }
        return cls(
            explore=how["explore"],
            flat=how["flat"],
            threads=how["threads"],
            module=names,
            model_config=configs,
            pieces={name: [piece.name for piece in pipeline.connectors] for name, pipeline in acting.named_pipelines},
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

    def check(self, acting: AnyActing, name: str) -> None:
        """Raise ModuleError or ConnectorError where a host's modules or pieces are others than the rollout's."""
        for module_id, kind in self.module.items():
            if (named := type(acting.by_id[module_id][0]).__name__) != kind:
                raise ModuleError(
                    f"the {self._named(module_id)} of host {name} is {named}; expected that of the rollout: {kind}"
                )
        mine = {which: [piece.name for piece in pipeline.connectors] for which, pipeline in acting.named_pipelines}
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


def _is_stage(stage: Any) -> bool:
    if not isinstance(stage, list) or len(stage) not in (3, 7):
        return False
    name, items, *seconds = stage
    piece = seconds.pop() if len(stage) == 7 else ""
    is_named = isinstance(name, str) and isinstance(piece, str) and len(piece) <= 1 << 10
    is_timed = all(isinstance(each, float | int) and each >= 0 for each in seconds)
    return is_named and is_timed and is_whole(items) and items >= 0


_STAGE = field.check_that(_is_stage, "a list of name, items, busy seconds and times")


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Report that comes with a fragment.

    start         how often the environments were made anew
    steps         transitions made since then
    seed          of the environments since then
    lost_steps    transitions that were under way when the environments raised
    failure       what they raised; None: nothing
    nodes         what every stage has counted, as `LaneRollout.report` has it
    deviations    of observations from their space: (kind, text)
    """

    start: _Count
    steps: _Count
    seed: _Count
    lost_steps: _Count
    failure: Annotated[str | None, field.nullable(field.text(1 << 16))]
    nodes: Annotated[Sequence[list[Any]], field.list_of(_STAGE, 64)]
    deviations: Annotated[
        Sequence[Sequence[str]],
        field.list_of(field.items(field.one_of(*KINDS), _LINE), len(KINDS)),
    ] = ()


class LaneProgress(NamedTuple):
    """Progress of a lane.

    start       how often its environments were made anew
    steps       transitions made since then
    pulse       how often it has got on with something
    is_in_vain  whether its turn will end without a step: it is to end, and environments are still made or reset
    """

    start: int = 0
    steps: int = 0
    pulse: int = 0
    is_in_vain: bool = False


def account_of(rest: Mapping[str, Any], slots: int) -> RolloutReport:
    """Report that a lane of so many slots has given with a fragment. Raises WireError where it makes no sense."""
    account = RolloutReport(**field.checked_fields(RolloutReport, rest, "rest"))
    if account.lost_steps > slots:
        raise WireError(f"rest.lost_steps is {account.lost_steps}, expected a whole number from 0 to {slots}")
    return account


def metrics_of(progress: Mapping[int, LaneProgress]) -> dict[str, Any]:
    """Progress of lanes, as it goes over the wire."""
    return {"lanes": [[lane, each.start, each.steps, each.pulse, each.is_in_vain] for lane, each in progress.items()]}


_PROGRESS = field.items(lane=_COUNT, start=_COUNT, steps=_COUNT, pulse=_COUNT, is_in_vain=field.flag)


def progress_of(metrics: Mapping[str, Any], lanes: Collection[int]) -> dict[int, LaneProgress]:
    """Progress of some of a host's lanes, as it says. Raises WireError where it makes no sense."""
    entries = field.list_of(_PROGRESS, len(lanes))(metrics.get("lanes"), "metrics.lanes")
    if others := {lane for lane, *_ in entries}.difference(lanes):
        raise WireError(f"metrics.lanes: lanes {sorted(others)}, expected some of {shown(list(lanes))}")
    return {lane: LaneProgress(*progress) for lane, *progress in entries}
