"""Settings of a rollout for its hosts, and the progress of a lane that they tell."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rollflow.nodes.modules.default_module import DefaultModule, model_config_of
from rollflow.nodes.offloaded.lane_rollout import AnyActing
from rollflow.stream.data.errors import ConnectorError, ModuleError
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_NUMBER

_COUNT = field.whole(0, MOST_NUMBER)


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

    fragment_length: int
    lookback: int
    seed: int
    explore: bool | Mapping[str, bool]
    flat: bool | None
    threads: int | None
    module: Mapping[str, str]
    model_config: Mapping[str, Any]
    pieces: Mapping[str, Sequence[str]]

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

    def check(self, acting: AnyActing, name: str) -> None:
        """Raise ModuleError or ConnectorError if a host's modules or pieces are others than the rollout's."""
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
        """Raise ModuleError if a host was given other modules, or none, and the rollout has some of its own."""
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

    def checked(self) -> "LaneProgress":
        """This, as it came from another host. Raises WireError for numbers that are none."""
        for name, value in zip(self._fields[:3], self, strict=False):
            _COUNT(value, name)
        return self


def check_report(report: Mapping[str, Any]) -> None:
    """Raise WireError or KeyError where what is counted with is none in another host's report of a turn."""
    for name in ("start", "steps", "seed"):
        _COUNT(report[name], name)
    _COUNT(report.get("lost_steps", 0), "lost_steps")
    _STAGES(report["nodes"], "nodes")


def _are_stages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list)
        and len(each) in (3, 7)
        and isinstance(each[0], str)
        and all(isinstance(number, int | float) for number in each[1:6])
        for each in value
    )


_STAGES = field.check_that(_are_stages, "lists of name, items, busy seconds, and what calls took")
