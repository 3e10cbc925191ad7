"""Blocks full of random numbers, in whatever format the arena is: for steps whose KV nobody computed."""

from torch import Tensor

from executor.arena import Arena


def fill_random(arena: Arena) -> None:
    """Normal numbers; codes are any, of a size that their scales bring back to about that."""
    for views in arena.views:
        _fill(views.k, views.k_scale)
        _fill(views.v, views.v_scale)


def _fill(view: Tensor, scale: Tensor | None) -> None:
    if scale is None:
        view.normal_()
    else:
        view.random_(-127, 128) if not view.is_floating_point() else view.copy_(view.float().uniform_(-127, 127))
        scale.uniform_(0.01, 0.03)
