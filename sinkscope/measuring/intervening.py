"""A loaded model changed until the end of a block, for any use of it.

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
from sinkscope.models.in_memory import called_uncompiled, check_called_itself, on_cpu_by_default, unwrapped


@contextmanager
def intervening(model: nn.Module, *do: str | Intervention | Iterable[str | Intervention]) -> Iterator[None]:
    """Change a loaded model until the end of the block: calls, `generate` and gradients are those of the changed model.

    Interventions are applied in their order; afterwards the model is bit for bit as it was. What torch.compile has made
    of the model runs uncompiled in the block.

    Args:
        model: of transformers, also in torch.compile, PEFT, DistributedDataParallel or DataParallel on one device.
        *do: interventions, as the command line has them or as objects, one by one or in lists.

    Raises:
        InputError: one does not apply, names what the model does not have, or would change nothing.
        SinkscopeError: the model attends by code that computes something else than sinkscope does; or at the end, no
            forward pass had the position that was to be changed.
    """
    check_called_itself(model)
    network = unwrapped(model)
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
