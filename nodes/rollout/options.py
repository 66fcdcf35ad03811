"""Options of a rollout, in a frozen record that checks them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
class RolloutOptions:
    """Options of a rollout: those of its arguments that both kinds of rollouts have; see `Rollout`.

    seed          of every environment, and of sampling
    slot_seeds    one seed for each slot's environment; None: they follow from `seed`
    explore       True or False; of several modules also a dict, module id -> True or False
    stall         rules of the stall doctor

    Raises ValueError for numbers that are none, or too small, and for what makes no sense.
    """

    num_envs: int | None
    lanes: int | None
    where: Place
    autoreset_mode: Autoreset = None
    workers: int | None
    step_timeout: float | None
    reset_timeout: float | None
    fragment_length: int
    seed: int
    slot_seeds: tuple[int, ...] | None
    explore: Any
    flat_forward: bool | None
    compile_forward: bool | Mapping[str, Any]
    forward_threads: int | None
    max_batch: int | None
    max_wait: float
    forward_in_thread: bool
    device: Any
    metrics: Any
    debug: bool
    lookback: int | None
    num_fragments: int | None
    prefetch: int
    max_lag: int | None
    on_excess: OnExcess
    stall: StallRules
    log: LogOptions

    def __post_init__(self) -> None:
        checked_count("fragment_length", self.fragment_length, 1)
        check_numbers(
            workers=(self.workers, 1),
            step_timeout=(self.step_timeout, 0),
            reset_timeout=(self.reset_timeout, 0),
            max_batch=(self.max_batch, 1),
            forward_threads=(self.forward_threads, 1),
            lookback=(self.lookback, 0),
            num_fragments=(self.num_fragments, 1),
            max_lag=(self.max_lag, 0),
        )
        checked_number("max_wait", self.max_wait, least=0, noun="seconds")
        checked_count("prefetch", self.prefetch, 0)
        flat = self.flat_forward is not None and self.flat_forward
        check_flags(debug=self.debug, forward_in_thread=self.forward_in_thread, flat_forward=flat)
        check_staleness(self.max_lag, self.on_excess)
        if not isinstance(self.compile_forward, bool | Mapping):
            raise ValueError(
                f"compile_forward is {self.compile_forward!r}, expected True, False or a dict of torch.compile's "
                "options"
            )
        if self.flat_forward and self.compile_forward is not False:
            raise ValueError("flat_forward and compile_forward are two ways of doing a pass, expected one of them")

    @property
    def timeouts(self) -> dict[str, Any]:
        """The keywords `step_timeout` and `reset_timeout`."""
        return {"step_timeout": self.step_timeout, "reset_timeout": self.reset_timeout}

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

    def check_offloaded(self, *, is_remote: bool) -> None:
        """Raise ValueError for what whole rollouts elsewhere can't do: on other hosts, or in worker processes."""
        if is_remote and self.debug:
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
        if self.metrics is not None and not isinstance(self.metrics, MetricsLogger):
            raise ValueError(
                f"metrics is {type(self.metrics).__name__}, expected a MetricsLogger: every worker has one, to be "
                "merged"
            )


def options_of(arguments: Mapping[str, Any]) -> RolloutOptions:
    """The options of a rollout with these arguments; with `debug` everything is inline. Raises ValueError."""
    seed, slot_seeds = seeds_of(arguments["seed"])
    of_log = (arguments[name] for name in ("log", "log_every", "log_x", "num_fragments", "trace"))
    values = dict(arguments, seed=seed, slot_seeds=slot_seeds, log=LogOptions(*of_log))
    values["stall"] = StallRules(arguments["stall_after"], arguments["on_stall"])
    names = {each.name for each in fields(RolloutOptions)} & values.keys()
    options = RolloutOptions(**{name: values[name] for name in names})
    if not options.debug:
        return options
    here = replace(options, where="inline", workers=None, prefetch=0)
    return replace(
        here, flat_forward=False, compile_forward=False, max_batch=None, max_wait=0.0, forward_in_thread=False
    )
