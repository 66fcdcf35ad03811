"""Actions clipped into the environments' bounds."""

from typing import Any

import gymnasium as gym

from rollflow.nodes.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions


class ClipActions(NormalizeAndClipActions):
    """`NormalizeAndClipActions` that clips alone: adds `actions_for_env`, and leaves `actions` as they were chosen."""

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, normalize_actions=False, clip_actions=True)
