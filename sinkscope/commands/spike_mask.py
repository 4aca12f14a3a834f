"""The Python function `spike_mask`, the mask that `analyze --export-mask` writes, of any token ids or texts."""

from typing import Any, Unpack

from transformers import PreTrainedTokenizerBase

from sinkscope.commands.measured import opened
from sinkscope.measuring.spike_mask import SpikeMask, measured_mask
from sinkscope.measuring.subject import ModelLike, options_of
from sinkscope.options.keywords import AnalyzeKeywords
from sinkscope.options.measuring import AnalyzeOptions
from sinkscope.options.signatures import with_options


@with_options(AnalyzeOptions)
def spike_mask(
    model: ModelLike = None,
    ids: Any = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quiet: bool = True,
    **options: Unpack[AnalyzeKeywords],
) -> SpikeMask:
    """Return which tokens are sinks in the output of which layers, and the coordinates that are large there.

    Args:
        model: as for `analyze`.
        ids: token ids (N,T), lists of token ids, or texts; None: the input that `options` name.
        tokenizer, quiet: as for `analyze`.
        **options: those of `analyze`.

    Raises:
        InputError: an option or the input is wrong, or the model has no attention.
        SinkscopeError: the measurement failed.
    """
    given = options if ids is None else {"bos": "never", "input": ids} | options
    config = options_of(AnalyzeOptions, model, given)
    with opened(model, tokenizer, config, None, False, quiet) as (subject, _, _):
        return measured_mask(subject, config)
