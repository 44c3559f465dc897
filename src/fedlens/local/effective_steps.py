"""The effective number of steps of an update: the norm that FedNova divides by."""

from __future__ import annotations

from fedlens.local.settings import LocalSettings


def effective_steps(settings: LocalSettings, lr: float, steps: int, proximal: float = 0.0) -> float:
    """||a||_1 of Wang et al. 2020 (arXiv 2007.07481): a client's update is lr sum_t a_t g_t over its gradients g_t.

    For plain SGD it is the number of steps. With momentum m (section 4), a_t = (1 - m^(K - t)) / (1 - m); with a
    proximal term, a_t = (1 - lr mu)^(K - 1 - t). Both together, and Nesterov's momentum, follow from the same linear
    recursion: it is applied to a single gradient of 1, and its value after j steps is a_(K - j).

    >>> local = LocalSettings(lr=0.1, momentum=0.5)
    >>> effective_steps(local, 0.1, 3)  # 1 + 1.5 + 1.75
    4.25
    >>> effective_steps(LocalSettings(lr=0.1), 0.1, 2, proximal=1.0)
    1.9
    """
    momentum, nesterov = settings.momentum, settings.nesterov
    moved, velocity, total = 0.0, 0.0, 0.0
    for step in range(steps):
        gradient = (1.0 if step == 0 else 0.0) - lr * proximal * moved
        velocity = momentum * velocity + gradient
        moved += gradient + momentum * velocity if nesterov else velocity
        total += abs(moved)
    return total
