"""What an estimator or a loss needs, as data that can be read before a run starts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Declared with `@requires(...)`; an entry without it requires nothing."""

    needs: tuple[str, ...] = ()
    """Optional fields of AdvantageInputs or LossInputs that must be there."""
    min_group_size: int = 1
    """Below this `rollout.n` there is no baseline: every advantage is 0."""
    agg_modes: tuple[str, ...] | None = None
    """The aggregations that a loss is defined with; None = any."""
    own_is_weights: bool = False
    """The loss applies `rollout_is_weights` itself."""
    select: Callable[..., Any] | None = None
    """`select(inputs, *, seed, **options) -> bool [T]` chooses tokens over the whole mini-batch;
    the loss gets its part of them as the keyword argument `selected`."""

    def check_inputs(self, what: str, inputs: Any) -> None:
        """Raise ValueError when a needed field is None."""
        for name in self.needs:
            if getattr(inputs, name, None) is None:
                raise ValueError(f"{what} needs {name!r}, but {type(inputs).__name__} has none")

    def check_agg_mode(self, what: str, mode: str) -> None:
        """Raise ValueError when `mode` is not what the loss is defined with."""
        if self.agg_modes is not None and mode not in self.agg_modes:
            raise ValueError(
                f"actor.loss_agg_mode: got {mode!r}, but {what} is defined with another mean; "
                f"set actor.loss_agg_mode={' or '.join(self.agg_modes)}"
            )


def requires(**declared: Any) -> Callable[[F], F]:
    """Decorate an estimator or a loss with its Requirements.

    >>> @requires(needs=("values",))
    ... def gae(inputs, *, gamma: float = 1.0): ...
    """

    def decorator(entry: F) -> F:
        entry.requirements = Requirements(**declared)  # type: ignore[attr-defined]
        return entry

    return decorator


def requirements(entry: Callable[..., Any]) -> Requirements:
    """Return what `entry` declares."""
    return getattr(entry, "requirements", Requirements())
