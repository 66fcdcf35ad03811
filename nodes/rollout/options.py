"""Options of a rollout, in frozen records that hold what belongs together and check it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from rollflow.nodes.argument_checks import check_flags, check_numbers, checked_count, checked_number, seeds_of
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.env.env_source import Autoreset
from rollflow.nodes.launch.on_hosts import OnHosts
from rollflow.nodes.logs.destinations import LogOptions
from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.modules.default_module import DefaultModule
from rollflow.nodes.stages.acting import compile_options
from rollflow.nodes.stages.staleness import OnExcess, check_staleness
from rollflow.stream.observe.watch import StallRules

Pieces = ConnectorV2 | Sequence[ConnectorV2]
JOINT_PASSES = "max_batch, max_wait and forward_in_thread are for a forward pass over several lanes"
Where = Literal["inline", "threads", "processes", "rollouts", "auto"]
Place = Where | OnHosts


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """Options of environments: their number, their place, and how long they may take; see `Rollout`.

    seed          of every environment
    slot_seeds    one seed for each slot's environment; None: they follow from `seed`

    Raises ValueError for numbers that are none, or too small.
    """

    num_envs: int | None = None
    lanes: int | None = None
    where: Place = "inline"
    autoreset_mode: Autoreset = None
    workers: int | None = None
    step_timeout: float | None = 60.0
    reset_timeout: float | None = 120.0
    fragment_length: int = 128
    seed: int = 0
    slot_seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checked_count("fragment_length", self.fragment_length, 1)
        check_numbers(
            workers=(self.workers, 1),
            step_timeout=(self.step_timeout, 0),
            reset_timeout=(self.reset_timeout, 0),
        )

    @property
    def timeouts(self) -> dict[str, Any]:
        """The keywords `step_timeout` and `reset_timeout`."""
        return {"step_timeout": self.step_timeout, "reset_timeout": self.reset_timeout}

    def debugged(self) -> "EnvOptions":
        """These options with every environment in the loop's thread."""
        return replace(self, where="inline", workers=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """Options of forward passes while acting; see `Rollout`.

    explore        True or False; of several modules also a dict, module id -> True or False
    is_debugged    whether `debug` was asked for

    Raises ValueError for what is no number, or neither True nor False, and for both `flat_forward` and
    `compile_forward`.
    """

    explore: Any = True
    flat_forward: bool | None = None
    compile_forward: bool | Mapping[str, Any] = False
    forward_threads: int | None = 1
    max_batch: int | None = None
    max_wait: float = 0.0
    forward_in_thread: bool = False
    device: Any = None
    is_debugged: bool = False

    def __post_init__(self) -> None:
        check_numbers(max_batch=(self.max_batch, 1), forward_threads=(self.forward_threads, 1))
        checked_number("max_wait", self.max_wait, least=0, noun="seconds")
        check_flags(
            forward_in_thread=self.forward_in_thread, flat_forward=self.flat_forward is not None and self.flat_forward
        )
        if not isinstance(self.compile_forward, bool | Mapping):
            raise ValueError(
                f"compile_forward is {self.compile_forward!r}, expected True, False or a dict of torch.compile's "
                "options"
            )
        if self.flat_forward and self.compile_forward is not False:
            raise ValueError("flat_forward and compile_forward are two ways of doing a pass, expected one of them")

    def debugged(self) -> "ForwardOptions":
        """These options with the module's own passes, lane by lane, in the loop's thread."""
        apart = ForwardOptions(explore=self.explore, forward_threads=self.forward_threads, device=self.device)
        return replace(apart, flat_forward=False, is_debugged=True)

    @property
    def joins_lanes(self) -> bool:
        """True where a forward pass may be over several lanes, or beside the lanes' steps."""
        return self.max_batch is not None or self.max_wait > 0 or self.forward_in_thread

    def of_passes(self, module: Any) -> dict[str, Any]:
        """Keywords of `ModuleForward` for a module. `flat_forward=None` is for flat passes of a `DefaultModule`."""
        compiled = compile_options(self.compile_forward)
        flat = self.flat_forward
        if flat is None:
            flat = type(module) is DefaultModule and compiled is None
        return {"explore": self.explore, "flat": flat, "threads": self.forward_threads, "compiled": compiled}

    def of_several(self) -> dict[str, Any]:
        """Keywords of forward passes for a `ModuleSet`, which sees to the rest of them module by module."""
        return {
            "flat": self.flat_forward,
            "threads": self.forward_threads,
            "compiled": compile_options(self.compile_forward),
        }

    def check_offloaded(self, metrics: Any, *, is_remote: bool) -> None:
        """Raise ValueError for what whole rollouts elsewhere can't do: on other hosts, or in worker processes.

        metrics    what pieces log into; None: a `MetricsLogger`
        """
        if is_remote and self.is_debugged:
            raise ValueError(
                "debug is for what runs in this process, and RemoteRollouts act on the hosts; expected RemoteEnvs, or "
                "environments here"
            )
        for name, is_given in (
            ("compile_forward", self.compile_forward is not False),
            ("device", self.device is not None),
        ):
            if is_remote and is_given:
                raise ValueError(
                    f"{name} is for forward passes here, and RemoteRollouts do theirs on the hosts; expected it to be "
                    "given to each RolloutHost"
                )
        if self.joins_lanes:
            place, expected = "where='rollouts' has", "where='threads' or where='processes'"
            if is_remote:
                place, expected = "RemoteRollouts have", "RemoteEnvs"
            raise ValueError(f"{JOINT_PASSES}, but {place} one for each; expected {expected}")
        if metrics is not None and not isinstance(metrics, MetricsLogger):
            raise ValueError(
                f"metrics is {type(metrics).__name__}, expected a MetricsLogger: every worker has one, to be merged"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOptions:
    """Options of the flow of fragments: their number, lookback, prefetch, staleness, stalls and log; see `Rollout`.

    stall    rules of the stall doctor

    Raises ValueError for numbers that are none, or too small, and for what `LagBound` does not take.
    """

    lookback: int | None = None
    num_fragments: int | None = None
    prefetch: int = 0
    max_lag: int | None = None
    on_excess: OnExcess = "drop"
    stall: StallRules = field(default_factory=StallRules)
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        checked_count("prefetch", self.prefetch, 0)
        check_numbers(lookback=(self.lookback, 0), num_fragments=(self.num_fragments, 1), max_lag=(self.max_lag, 0))
        check_staleness(self.max_lag, self.on_excess)

    def debugged(self) -> "FlowOptions":
        """These options without running ahead, which takes a thread."""
        return replace(self, prefetch=0)


def options_of(arguments: Mapping[str, Any]) -> tuple[EnvOptions, ForwardOptions, FlowOptions]:
    """The options among the arguments of a rollout; with `debug` everything is inline. Raises ValueError as they do."""
    seed, slot_seeds = seeds_of(arguments["seed"])
    of_log = (arguments[name] for name in ("log", "log_every", "log_x", "num_fragments", "trace"))
    values = dict(arguments, seed=seed, slot_seeds=slot_seeds, log=LogOptions(*of_log))
    values["stall"] = StallRules(arguments["stall_after"], arguments["on_stall"])

    def among(options: Any) -> Any:
        names = {each.name for each in fields(options)} & values.keys()
        return options(**{name: values[name] for name in names})

    envs, forward, flow = among(EnvOptions), among(ForwardOptions), among(FlowOptions)
    return (envs.debugged(), forward.debugged(), flow.debugged()) if arguments["debug"] else (envs, forward, flow)
