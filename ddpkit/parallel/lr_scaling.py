"""Scale batch size and learning rate with the number of ranks: plain arithmetic, no torch.

More ranks mean a larger global batch, or a smaller share of the same batch, and perhaps another
learning rate. `ScalePlan` makes that decision once, prints it, and applies it once.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from ..arguments import as_integer

Rule = Literal["linear", "sqrt", "none"]

_RULES: dict[Rule, tuple[str, ...]] = {
    "linear": ("SGD", "LARS"),
    "sqrt": ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "Adagrad", "RMSprop", "Lamb", "LAMB"),
}
_POWERS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
_SCALED_BY = "lr_scaled_by"  # in the optimizer's groups, so that checkpoints contain it


def scale_lr(base_lr: float, factor: float, rule: Rule = "linear") -> float:
    """Scale a learning rate for a batch `factor` times as large.

    Args:
        base_lr: Learning rate for the base batch.
        factor: Global batch / base batch, above 0.
        rule: "linear" multiplies by `factor` (SGD, Goyal et al. 2017), "sqrt" by its root (Adam,
            Malladi et al. 2022), "none" keeps the learning rate.

    Returns:
        The learning rate for the large batch.

    Raises:
        ValueError: If `factor` is not positive and finite, or the rule is unknown.

    References:
        Goyal et al. 2017, Accurate, Large Minibatch SGD, arXiv:1706.02677 (linear, with warm-up).
        Krizhevsky 2014, One weird trick, arXiv:1404.5997, and Hoffer et al. 2017, arXiv:1705.08741
        (sqrt for SGD).
        Malladi et al. 2022, On the SDEs and Scaling Rules for Adaptive Gradient Algorithms,
        arXiv:2205.10287 (sqrt for Adam and RMSprop). You et al. 2019, LAMB, arXiv:1904.00962
        (sqrt).

    Example:
        >>> scale_lr(0.1, 8), scale_lr(0.001, 4, "sqrt"), scale_lr(0.1, 8, "none")
        (0.8, 0.002, 0.1)
    """
    if rule not in _POWERS:
        raise ValueError(f"rule must be one of {', '.join(_POWERS)}, got {rule!r}.")
    if not 0 < factor < math.inf:
        raise ValueError(f"factor must be positive and finite (global batch / base batch), got {factor!r}.")
    return float(base_lr * factor ** _POWERS[rule])


def warmup_factor(step: int, steps: int, start: float = 0.0) -> float:
    """Return the learning-rate factor at a step of a linear warm-up.

    Args:
        step: Optimiser steps taken so far, from 0. Pass `step + 1` to avoid a step at factor 0.
        steps: Length of the warm-up in optimiser steps; 0 means none. Derive it from samples:
            `plan.steps(samples, epochs)`.
        start: Factor at step 0. Goyal et al. 2017 (arXiv:1706.02677) start from the base learning
            rate, 1 / scale.

    Returns:
        `start` at step 0, 1.0 from step `steps` on, linear in between.

    Example:
        >>> [warmup_factor(step, 4) for step in (0, 1, 4, 99)]
        [0.0, 0.25, 1.0, 1.0]
    """
    if step < 0 or steps < 0:
        raise ValueError(f"step and steps must be at least 0, got step={step}, steps={steps}.")
    if step >= steps:
        return 1.0
    return start + (1.0 - start) * step / steps


def rule_for(optimizer: Any) -> Rule:
    """Return the learning-rate rule for an optimizer.

    Linear for SGD and LARS; sqrt for Adam, RMSprop, Adagrad, LAMB and their variants. SGD's update
    is proportional to the gradient, so k steps on small batches are about one step, k times as
    long, on a batch k times as large (Goyal et al. 2017). Adam divides by the gradient's size,
    which for small batches is mostly noise, and noise shrinks with the root of the batch (Malladi
    et al. 2022; You et al. 2019).

    Args:
        optimizer: An optimizer or its class, recognised by the names of its class and base classes.

    Raises:
        ValueError: If the class is unknown; choose the rule yourself.

    Example:
        >>> import torch
        >>> rule_for(torch.optim.SGD), rule_for(torch.optim.AdamW)
        ('linear', 'sqrt')
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    for base in cls.__mro__:
        for rule, names in _RULES.items():
            if base.__name__ in names:
                return rule
    raise ValueError(
        f"No learning-rate rule is known for {cls.__name__}; pass rule='linear', 'sqrt' or 'none' yourself."
    )


@dataclass(frozen=True)
class ScalePlan:
    """Adjust batch size or learning rate to the number of ranks, and print the result.

    Args:
        base_batch_size: Samples per optimiser step that `base_lr` was chosen for, on one process.
        base_lr: That learning rate.
        world_size: Number of ranks.
        keep: "per_rank": each forward has `base_batch_size` samples, the global batch grows with the
            number of ranks and micro-batches, and the learning rate follows the rule. "global": the
            global batch stays `base_batch_size` and is split, and the learning rate stays.
        rule: "linear", "sqrt", "none", or "auto": `rule_for` of the optimizer passed to `apply`.
        accumulation: Micro-batches per optimiser step.

    Raises:
        ValueError: If an argument is out of range, or with keep="global" the batch does not divide
            evenly.

    Example:
        >>> plan = ScalePlan(256, 0.1, world_size=8, rule="linear")
        >>> plan.per_rank_batch_size, plan.global_batch_size, plan.lr, plan.steps(1_000_000, epochs=2)
        (256, 2048, 0.8, 978)
        >>> print(plan)
        ranks x accumulation  8 x 1
        batch per rank        256 samples per forward
        global batch          2048 samples per optimiser step, 8 x the base of 256
        learning rate         0.1 -> 0.8 (linear)
    """

    base_batch_size: int
    base_lr: float
    world_size: int
    _: KW_ONLY
    keep: Literal["per_rank", "global"] = "per_rank"
    rule: Rule | Literal["auto"] = "auto"
    accumulation: int = 1

    def __post_init__(self) -> None:
        for name in ("base_batch_size", "world_size", "accumulation"):
            object.__setattr__(self, name, as_integer(getattr(self, name), name))
        if not 0 < self.base_lr < math.inf:
            raise ValueError(f"base_lr must be positive and finite, got {self.base_lr!r}.")
        if self.keep not in ("per_rank", "global"):
            raise ValueError(f"keep must be 'per_rank' or 'global', got {self.keep!r}.")
        if self.rule not in (*_POWERS, "auto"):
            raise ValueError(f"rule must be one of {', '.join(_POWERS)}, auto, got {self.rule!r}.")
        if self.keep == "global" and self.base_batch_size % self._micro_batches:
            raise ValueError(
                f"A global batch of {self.base_batch_size} does not divide into {self.world_size} "
                f"ranks x {self.accumulation} micro-batches: choose a multiple of {self._micro_batches}."
            )

    @property
    def _micro_batches(self) -> int:
        """Return the number of forwards per optimiser step, over all ranks."""
        return self.world_size * self.accumulation

    @property
    def per_rank_batch_size(self) -> int:
        """Return the samples per forward on one rank, which is the `batch_size` of its loader."""
        if self.keep == "per_rank":
            return self.base_batch_size
        return self.base_batch_size // self._micro_batches

    @property
    def global_batch_size(self) -> int:
        """Return the samples per optimiser step, over all ranks and micro-batches."""
        return self.per_rank_batch_size * self._micro_batches

    @property
    def factor(self) -> float:
        """Return global batch / base batch."""
        return self.global_batch_size / self.base_batch_size

    @property
    def lr(self) -> float:
        """Return the learning rate for the global batch.

        Raises:
            ValueError: If the rule is "auto" and the global batch differs from the base batch: the
                learning rate then depends on the optimizer.
        """
        if self.factor == 1:
            return float(self.base_lr)
        if self.rule == "auto":
            raise ValueError(
                "With rule='auto' the learning rate depends on the optimizer: pass "
                "rule=rule_for(optimizer), or rule_for its class."
            )
        return scale_lr(self.base_lr, self.factor, self.rule)

    def steps(self, samples: int, epochs: float | None = None) -> int:
        """Return the optimiser steps of some epochs.

        The last, incomplete step of each epoch counts, so that three epochs may take more steps than
        their samples in one go. A loader knows its own: `epochs * loader.steps_per_epoch`.

        Args:
            samples: Samples per epoch, of all ranks together.
            epochs: Number of epochs, such as 0.5 for a warm-up.

        Raises:
            TypeError: If `epochs` is missing.
            ValueError: If a number is negative.
        """
        if epochs is None:
            raise TypeError(
                "plan.steps() needs the number of epochs, because the last step of each may be incomplete: "
                "plan.steps(len(dataset), epochs=3), or 3 * loader.steps_per_epoch."
            )
        if samples < 0 or epochs < 0:
            raise ValueError(f"samples and epochs must be at least 0, got samples={samples}, epochs={epochs}.")
        return math.ceil(epochs * -(-samples // self.global_batch_size) - 1e-9)  # .07 * 100 is not quite 7

    def apply(self, optimizer: Any) -> None:
        """Scale the learning rate of every parameter group in place, once.

        Create the optimizer with its base learning rates, which may differ between groups, and call
        this before creating any scheduler. The groups record it in the optimizer's state dict, so
        that a resumed run does not scale twice.

        Args:
            optimizer: A torch optimizer, or anything with `param_groups`.

        Raises:
            ValueError: If the optimizer was scaled before, or a scheduler has already read its
                learning rates.
        """
        for group in optimizer.param_groups:
            if _SCALED_BY in group:
                raise ValueError(
                    f"This optimizer's learning rate was already scaled by {group[_SCALED_BY]:g}; "
                    "apply a plan only once."
                )
            if "initial_lr" in group:
                raise ValueError(
                    "A learning-rate scheduler has already read this optimizer's learning rate (initial_lr "
                    "is set) and would undo the scaling. Apply the plan before creating the scheduler."
                )
        scale = scale_lr(1.0, self.factor, rule_for(optimizer) if self.rule == "auto" else self.rule)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * scale
            group[_SCALED_BY] = scale

    def __str__(self) -> str:
        rules: tuple[Rule, ...] = ("linear", "sqrt") if self.rule == "auto" else (self.rule,)
        scaled = [f"{scale_lr(self.base_lr, self.factor, rule):g} ({rule})" for rule in rules]
        change = ", unchanged" if self.factor == 1 else f" -> {' or '.join(scaled)}"
        return (
            f"ranks x accumulation  {self.world_size} x {self.accumulation}\n"
            f"batch per rank        {self.per_rank_batch_size} samples per forward\n"
            f"global batch          {self.global_batch_size} samples per optimiser step, "
            f"{self.factor:g} x the base of {self.base_batch_size}\n"
            f"learning rate         {self.base_lr:g}{change}"
        )


def applied_scales(optimizer: Any) -> list[float | None]:
    """Return the factor by which `ScalePlan.apply()` scaled each group's learning rate."""
    return [group.get(_SCALED_BY) for group in optimizer.param_groups]
