"""How long heads are trained, and what is chosen from; without torch, so that a command refuses a mistake at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """What every head is given: the same epochs, batches and choices."""

    epochs: int = 10
    least_steps: int = 50  # of a training: few samples are gone over more often
    batch_size: int = 64
    learning_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    weight_decays: tuple[float, ...] = (0.01, 0.3)
    search_folds: int | None = None  # of five that settings are chosen by; None is all, or one of many samples

    def epochs_of(self, samples: int) -> int:
        """How often so many samples are gone over."""
        return max(self.epochs, -(-self.least_steps // -(-samples // self.batch_size)))
