"""The random controls of a stack of interventions."""

import torch

from sinkscope.interventions.intervention import Intervention, Known

Stack = tuple[Intervention, ...]


def random_controls(stack: Stack, known: Known, seed: int, draws: int) -> list[Stack]:
    """The stack with each part replaced by its random control where it has one, `draws` times, all different if there
    are so many; empty where no part has a control.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Stack] = []
    for _ in range(20 * draws):
        if len(found) == draws:
            break
        controls = [part.control(known, generator) for part in stack]
        if all(control is None for control in controls):
            break
        drawn = tuple((control or part).resolved(known) for part, control in zip(stack, controls, strict=True))
        if drawn not in found:
            found.append(drawn)
    return found
