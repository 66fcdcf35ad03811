"""TorchRL: its `Collector`, over gymnasium's `SyncVectorEnv`, one TensorDict a fragment."""

from typing import Any

from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs.libs.gym import GymWrapper

from benchmarks.policies import Mlp, sampled


class Runner:
    """Collects a fragment at a time."""

    def __init__(self, make: Any, slots: int, fragment_length: int) -> None:
        policy = Mlp()

        def act(observation: Any) -> Any:
            output = policy._forward({"obs": observation})
            return *sampled(output["action_dist_inputs"]), output["vf_preds"]

        envs = SyncVectorEnv([make] * slots, autoreset_mode=AutoresetMode.DISABLED)
        module = TensorDictModule(act, in_keys=["observation"], out_keys=["action", "logp", "value"])
        env = GymWrapper(envs, categorical_action_encoding=True)
        frames = slots * fragment_length
        options: Any = {"frames_per_batch": frames, "total_frames": -1, "auto_register_policy_transforms": False}
        self._collector = iter(Collector(env, module, **options))

    def fragment(self) -> int:
        """One fragment; how many transitions it has."""
        return int(next(self._collector).numel())
