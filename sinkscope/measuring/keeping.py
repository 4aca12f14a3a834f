"""Raw tensors to look at: attention weights of any head, and activations of named sites."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from sinkscope.attention.weights import AttentionRead
from sinkscope.errors import InputError, unknown
from sinkscope.measuring.measure import choose
from sinkscope.measuring.observables.close_ups import AttentionMaps, first_columns, weights_among
from sinkscope.measuring.observables.observable import Lists, Observable, Reading
from sinkscope.measuring.random_weights import WEIGHTS_AT_RANDOM
from sinkscope.measuring.subject import ModelLike, Subject, family_of, inputs_for, load_model, position_limit
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.family import RESIDUAL_SITES
from sinkscope.models.files import is_demo
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.loading import LoadedModel
from sinkscope.options.given import OBJECTS, Given
from sinkscope.options.measuring import PERMISSIONS, CloseUpOptions, RunConfig
from sinkscope.options.option import MAX_INT, checked
from sinkscope.results.activations import ATTENTION, KEPT_SITES
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch, on_cpu
from sinkscope.text.tokens import token_texts

MOST_BYTES = 4 * 10**9  # size limit of the tensors that --keep names
OF_ATTENTION = ("query", "key", "value")


class KeptActivations(Observable):
    """Keeps activations of every sequence (one in each batch), and the attention weights of the first."""

    def __init__(self, wanted: Sequence[str], has_maps: bool) -> None:
        from_attention = has_maps or not {*OF_ATTENTION, ATTENTION}.isdisjoint(wanted)
        # of this instance, because every site that is read takes time
        self.sites = (*set(RESIDUAL_SITES).intersection(wanted), *(["attention"] if from_attention else []))  # type: ignore[misc]
        self.wanted = wanted
        self.has_maps = has_maps  # whether the first weights of the first sequence are kept
        self.rows: Lists[tuple[str, int], tuple[int, torch.Tensor]] = Lists(list)  # site, layer → sequence, (T,…)
        self.bytes = 0

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site in self.wanted:
            self._add(site, layer, reading.tensor[0], batch)

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        for site in set(self.wanted).intersection(OF_ATTENTION):
            self._add(site, layer, getattr(read, site)[0].transpose(0, 1), batch)
        if ATTENTION in self.wanted:
            self._add(ATTENTION, layer, weights_among(read, first_columns(batch, read.length)).half(), batch)
        elif self.has_maps and batch.first == 0:
            self.rows[ATTENTION, layer].append((0, weights_among(read, first_columns(batch)).half()))

    def _add(self, site: str, layer: int, tensor: torch.Tensor, batch: Batch) -> None:
        self.bytes += tensor.nbytes
        if self.bytes > MOST_BYTES:
            raise InputError(
                f"--keep {','.join(self.wanted)} takes more than {MOST_BYTES / 1e9:g} GB: "
                "name fewer sites, or take fewer --keep-seqs or a shorter --seq-len"
            )
        # a copy, because models may change the tensor in place
        self.rows[site, layer].append((batch.first, tensor.to("cpu", copy=True)))


def check_sites(keep: Sequence[str]) -> None:
    """Raise InputError for a site that does not exist."""
    for site in keep:
        if site not in KEPT_SITES:
            raise InputError(f"--keep {unknown(site, KEPT_SITES)}")


def keep(subject: Subject, config: CloseUpOptions) -> dict[str, torch.Tensor]:
    """Return the tensors of results/activations.py: all heads' weights if the run has maps, and what --keep names.

    No sequence is padded. Raises InputError for a head or a site that the model does not have, or if --keep takes more
    than MOST_BYTES.
    """
    model, family = subject.loaded.model, subject.family
    has_maps = AttentionMaps.name in choose(subject, config).follow_ups
    if config.heads and not has_maps:
        raise InputError("--heads needs the observable attention, which this run does not measure")
    unread = family.without_attention
    absent = family.absent_sites() | ({} if unread is None else dict.fromkeys((*OF_ATTENTION, ATTENTION), unread))
    for site in config.keep:
        if site in absent:
            raise InputError(f"--keep {site} does not apply to {subject.loaded.name}: {absent[site]}")
    if not (has_maps or config.keep):
        return {}
    inputs = subject.inputs.part(0, config.keep_seqs if config.keep else 1)
    observable = KeptActivations(config.keep, has_maps)
    with open_tracer(model, family, config.attn) as tracer:
        for batch in inputs.batches(1):  # in every process
            tracer.forward(batch, [observable])
    heads = {layer: len(rows[0][1]) for (site, layer), rows in observable.rows.items() if site == ATTENTION}
    for layer, head in config.pairs:
        check_head(layer, head, heads)
    tensors = {
        f"{site}.{layer}": _stacked([row for _, row in sorted(rows, key=lambda row: row[0])], site == ATTENTION)
        for (site, layer), rows in observable.rows.items()
    }
    tensors = dict(zip(tensors, on_cpu(tensors.values()), strict=True))
    sequences = inputs.whole().with_registers(registers_before(model))
    return tensors | {"token_ids": sequences.token_ids, "attention_mask": sequences.attention_mask}


def _stacked(rows: Sequence[torch.Tensor], has_two_lengths: bool) -> torch.Tensor:
    """Stack sequences, (T,…) or weights (H,T,T), with zeros past the ends of the shorter ones."""
    if has_two_lengths:
        longest = max(row.shape[-1] for row in rows)
        return torch.stack([F.pad(row, 2 * (0, longest - row.shape[-1])) for row in rows])
    return pad_sequence(list(rows), batch_first=True)


def check_head(layer: int, head: int | None, heads: Mapping[int, int]) -> None:
    """Raise InputError if a layer or its head does not exist; `heads` is the number of heads by layer."""
    if layer not in heads:
        last = max(heads, default=-1)
        missing = f"there is no layer {layer}: the last layer with heads is {last}"
        raise InputError(f"layer {layer} has no heads" if layer in range(last) else missing)
    if head is not None and head not in range(heads[layer]):
        raise InputError(f"layer {layer} has no head {head}: it has 0 to {heads[layer] - 1}")


def attention_of(
    manifest: Mapping[str, Any],
    layer: int,
    head: int | None,
    text: str | Sequence[int] | None,
    model: ModelLike,
    tokenizer: PreTrainedTokenizerBase | None,
    sequence: int = 0,
) -> tuple[torch.Tensor, list[str]]:
    """Run a run's model on a text or a sequence. Returns the weights of `Run.attention`, (H,T,T), and the tokens."""
    options = {name: value for name, value in manifest["config"].items() if name in RunConfig.model_fields}
    config = checked(RunConfig, options | dict.fromkeys(PERMISSIONS, False))
    if model is None and manifest["model"].get("weights") == WEIGHTS_AT_RANDOM:
        raise InputError("the weights of this run are random, and are not stored: pass the model as model=…")
    if model is None and config.model is None and not is_demo(manifest["model"]["source"]):
        raise InputError("this run's model was passed as an object and is gone: pass it again as model=…, tokenizer=…")
    loaded = load_model(model, tokenizer, config)
    network = loaded.model
    heads: dict[int, int] = {}  # layer → number of its heads
    weights, token_ids = torch.empty(0), list[int]()

    class Weights(Observable):
        """Keeps the weights of the head, or of all heads of the layer."""

        sites = ("attention",)

        def see_attention(self, seen_layer: int, read: AttentionRead, batch: Batch) -> None:
            nonlocal weights, token_ids
            heads[seen_layer] = read.query.shape[1]
            if seen_layer == layer and (head is None or head in range(heads[layer])):
                shown = first_columns(batch, read.length)
                weights = weights_among(read, shown, slice(None) if head is None else [head]).cpu()
                token_ids = batch.token_ids[0, shown].tolist()

    with undisturbed(network):
        family, _ = family_of(network)
        if text is None and config.input in OBJECTS:
            raise InputError("this run's sequences were passed as objects: pass the text as text=…")
        if text is None:
            inputs = inputs_for(loaded, config, family)
            if model is None and inputs.sha256 != manifest["input"]["sha256"]:
                raise InputError(f"the input {config.input} is not what this run has read: pass the text as text=…")
            if sequence not in range(len(inputs)):
                raise InputError(f"there is no sequence {sequence}: this run has 0 to {len(inputs) - 1}")
            inputs = inputs.part(sequence, sequence + 1)
        else:
            longest = position_limit(network, family) or MAX_INT
            source = {"prompt": text} if isinstance(text, str) else {"prompt": None, "input": Given(text)}
            one = source | {"dataset": None, "seq_len": longest}
            inputs = inputs_for(loaded, config.model_copy(update=one), family)
            if len(inputs) > 1:
                raise InputError("give the ids of one text")
            if inputs.cut:
                raise InputError(f"the text has more than the {longest} tokens that the model reads")
        with open_tracer(network, family, config.attn) as tracer:
            tracer.forward(next(inputs.batches(1)), [Weights(config)])
    check_head(layer, head, heads)
    texts = token_texts(loaded.tokenizer, token_ids)
    return weights.float(), [texts[token] for token in token_ids]


class ModelReference:
    """Returns a loaded model when called, or None once the user has dropped it; a copy in another process has none."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._described = replace(loaded, model=None)  # type: ignore[arg-type]
        self._model = weakref.ref(loaded.model)

    def __call__(self) -> LoadedModel | None:
        model = self._model()
        return None if model is None else replace(self._described, model=model)

    def __reduce__(self) -> Any:
        return type(None), ()
