"""A node that steps environments of tensors, whose lanes stay on their device if all pieces can work there."""

from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from gymnasium.vector import VectorEnv

from rollflow.nodes.connectors.common.batches import array_of
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import pieces_within
from rollflow.nodes.device.lane import DeviceLane
from rollflow.nodes.device.torch_envs import TorchEnvs
from rollflow.nodes.env.environments import ONE_AGENT, Environments
from rollflow.nodes.env.lane_source import check_apart
from rollflow.nodes.env.observation_check import ObservationCheck
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError, EnvError, ModuleError, shown
from rollflow.stream.data.tree import map_tree


class DeviceEnvironments(Environments):
    """A node that steps environments of tensors, one `TorchEnvs` for each lane, all on one device.

    device      of the environments
    is_there    whether lanes are on it, rather than of arrays

    All else is as for `Environments`. Raises EnvError also if environments are on several devices.
    """

    envs: Sequence[TorchEnvs]
    is_there: bool
    _in_arrays: Sequence[Any]
    _in_tensors: Sequence[Any]

    def choose_memory(self, pipelines: Sequence[Iterable[ConnectorV2]], device: torch.device | None) -> None:
        """Keep lanes on the device if every piece can work there; else have arrays, if that is allowed.

        Raises ConnectorError if it is not, and ModuleError for a module on another device.
        """
        piece = next((piece for piece in pieces_within(*pipelines) if not piece.on_device), None)
        if piece is not None and not all(env.allow_host_copies for env in self.envs):
            raise ConnectorError(
                f"{piece.name} would have each step copied from {self.device} to the host, since it has no form for "
                "tensors; expected a piece of rollflow that has one, or "
                f"{type(self.envs[0]).__name__}(…, allow_host_copies=True)"
            )
        if piece is None and device not in (None, self.device):
            raise ModuleError(
                f"the module is on {device}, but the environments are on {self.device}; expected "
                f"module.to('{self.device}')"
            ).see("module")
        if self.is_there != (piece is None):
            self.is_there, self._lanes_fit = piece is None, False
        self._here = self._in_tensors if self.is_there else self._in_arrays

    def describe(self) -> str:
        """Lanes and slots, and where they are, for `explain()`."""
        return f"{super().describe()} {'on' if self.is_there else 'copied to the host from'} {self.device}"

    def hand_over(self, lane: Any) -> Any:
        lane = super().hand_over(lane)
        if not self.is_there and lane is not None and lane.ended is not None:
            if self.envs[lane.index - self._first_lane].is_last_missing:
                lane.ended.repeat(lane.fragment.columns[Columns.OBS])  # as lanes on a device do
        return lane

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[VectorEnv[Any, Any, Any]]:
        made: Any = super()._made(env, num_envs, lanes)
        for lane, each in enumerate(made):
            if not isinstance(each, TorchEnvs):
                raise EnvError(f"lane {lane} is {shown(each)}, but another one a TorchEnvs; expected one in each lane")
        check_apart("lanes", (each.env for each in made))
        self.device, self.is_there = made[0].device, False
        for lane, each in enumerate(made):
            if each.device != self.device:
                raise EnvError(f"environments of lane {lane} are on {each.device}, expected {self.device} of lane 0")
        self._in_arrays = self._here
        self._in_tensors = [
            SimpleNamespace(
                reset=partial(self._reset, lane, each),
                step=each.step_tensors,
                **{name: getattr(in_arrays, name) for name in ("get_state", "set_state", "record_actions")},
            )
            for lane, (each, in_arrays) in enumerate(zip(made, self._here, strict=True))
        ]
        return made  # type: ignore[no-any-return]

    def _reset(self, lane: int, env: TorchEnvs, seeds: Sequence[int] | None) -> Any:
        """Begin, and look at the first observations once: at those of no step, which would be waited for."""
        observations, infos = env.reset_tensors(seeds)
        if self.device.type != "meta":
            check = ObservationCheck(env.single_observation_space, self.deviations, f"lane {lane}, ")
            check.slots(map_tree(array_of, observations))
        return observations, infos

    @torch.inference_mode(False)  # whose tensors could not be written to outside of it
    def _lane(self, index: int, vector: VectorEnv[Any, Any, Any], first_slot: int) -> Any:
        if not self.is_there:
            return super()._lane(index, vector, first_slot)
        layout = ONE_AGENT.layout(self, index, vector, self.seed)
        return DeviceLane(index, layout, self.observation_space, self.device)
