"""Interventions on a loaded model for the length of a block, for any use of the model.

with intervening(model, "zero-massive:layers=11,coordinates=507"):
    model.generate(…)
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from sinkscope.attention.seam import open_seam
from sinkscope.interventions import Intervention, Known, Target, applied, parse_all
from sinkscope.measuring.parity import check_beforehand
from sinkscope.measuring.subject import row_or_calibrated
from sinkscope.models.in_memory import called_uncompiled, on_cpu_by_default, unwrapped


@contextmanager
def intervening(model: nn.Module, *do: str | Intervention | Iterable[str | Intervention]) -> Iterator[None]:
    """Change a loaded model until the end of the block, for calls, `generate` and gradients.

    Interventions are applied in the given order. Afterwards the model is restored bit for bit. A compiled model runs
    uncompiled in the block.

    Args:
        model: A transformers model, also wrapped by torch.compile, PEFT, DistributedDataParallel, or DataParallel on
            one device.
        *do: Interventions as objects or in the syntax of the command line, single or in lists.

    Raises:
        InputError: An intervention does not apply, names something that the model does not have, or would change
            nothing.
        SinkscopeError: The model's attention differs from sinkscope's computation; or, at the end of the block,
            no forward pass contained the position to change.
    """
    network = unwrapped(model, changed=True)
    parts = [part for given in do for part in parse_all(given)]
    family, notices = row_or_calibrated(network)
    check_beforehand(network, family, is_calibrated=bool(notices))
    longest = getattr(network.config.get_text_config(), "max_position_embeddings", None) or 1
    with ExitStack() as stack:
        with on_cpu_by_default():
            stack.enter_context(called_uncompiled(network))
            target = Target(network, family, stack.enter_context(open_seam(network, family)))
            known = Known(target, longest)
            resolved = [part if part.inapplicable(target) else part.resolved(known) for part in parts]
            stack.enter_context(applied(target, resolved))
        yield
