"""Processes that train one layer together, as the training code sees them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

Tell = Callable[[int, dict[str, float]], None]  # hears of every step and its row of the history


class PeerError(Exception):
    """Another rank went away or is at another step: the machine's fault, worth another attempt."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes that share each global batch; `reduce` sums a tensor over all."""

    index: int = 0
    world: int = 1
    reduce: Callable[[Tensor], object] = field(default=lambda _: None)
