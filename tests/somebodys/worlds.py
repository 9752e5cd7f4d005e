"""Environments as a user of the robot's trainer may have them: one that works, and some that do not yet."""

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


class Array(Line):
    """Observes one array, not a dict."""

    observation_space = Box(-9, 9, (2,))

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**how)[0]["place"], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, *rest = super().step(action)
        return seen["place"], *rest


class Silent(Line):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"distance": 1.0}


class NotFinite(Line):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return {"place": np.array([0.0, np.nan])}, *rest


class Longer(Line):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return {"place": np.zeros(3)}, *rest


class Renamed(Line):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return {"spot": np.zeros(2)}, *rest


class Raising(Line):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise ZeroDivisionError("nowhere to go")


class Unmade(Line):
    def __init__(self) -> None:
        raise ValueError("no table")


class Late(Line):
    """Fails only where a policy acts for longer."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 2:
            raise RuntimeError("the motor is hot")
        return *super().step(action)[:2], False, False, {"success": False}
