"""An environment as a user of the robot's trainer may have one."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


class Line(gymnasium.Env):
    """A point moves on a line; an episode ends where its goal is, and nothing can be rendered."""

    observation_space = Dict(place=Box(-9, 9, (2,)))
    action_space = Box(-2, 2, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = np.array([0, self.np_random.uniform(-2, 2)])
        self.over = False
        return {"place": self.place.copy()}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.over:
            raise RuntimeError("this episode is over")
        self.place[0] += action[0]
        self.over = bool(abs(self.place[0] - self.place[1]) < 0.1)
        return {"place": self.place.copy()}, 0.0, self.over, False, {"success": self.over}
