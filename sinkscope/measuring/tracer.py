"""The tracer: one nnsight trace per batch, in which observables reduce every layer's sites as they are computed."""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from sinkscope.attention.kernels import AttentionCall, is_visible, upcast
from sinkscope.attention.seam import open_seam, why_unread
from sinkscope.attention.taps import NAME, Seam
from sinkscope.attention.weights import AttentionRead
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.intervention import Intervention, Target, applied
from sinkscope.measuring.losses import loss_and_gradient, loss_in_chunks
from sinkscope.measuring.memory import tokens_that_fit
from sinkscope.measuring.nnsight import OutOfOrderError, Traced, part_of, save, serving
from sinkscope.measuring.observables.observable import (
    ATTENTION_SITES,
    NEURONS,
    Observable,
    Pending,
    Reading,
    SiteStack,
    Sums,
    copied_entries,
    deliver,
)
from sinkscope.measuring.observables.reductions import filled
from sinkscope.models.edits import Beginning, begun
from sinkscope.models.family import RESIDUAL_SITES, Block, Family, embedding_path, first_tensor, input_device
from sinkscope.models.feed_forward import feed_forwards
from sinkscope.models.in_memory import one_thread, outside_autocast, unchanged_after
from sinkscope.retrofits.retrofit import RETROFIT, ValuePart, registers_before
from sinkscope.text.batch import Batch

STATISTICS = 8  # statistics by head and token that observables keep of a layer
# numbers that observables may keep before they reduce them
HELD, HELD_ELSEWHERE = {"cpu": 2**22}, 2**26


class Address(NamedTuple):
    """A value of a forward pass: a module's `output`, its first `input`, or all its `inputs` (args, kwargs)."""

    layer: int
    path: str  # the module's path within the layer
    end: str


Sought = Generator[Address, Any, None]  # yields the addresses that a forward pass reaches, and is sent their values


class Reader:
    """Reads every site of one forward pass into observables, in the order in which the pass reaches them."""

    def __init__(self, model: PreTrainedModel, family: Family, seams: dict[int, Seam], first: int = 0) -> None:
        self.model = model
        self.family = family
        self.seams = seams  # by layer, for the layers that have attention
        self.first = first  # the first layer that is read
        self.depth = len(family.layer_modules(model))
        self.registers = registers_before(model)
        self._feed_forwards = feed_forwards(model, family)
        self.values_are_gated = any(isinstance(module, ValuePart) for module in model.modules())
        self._attended: list[torch.Tensor] = []  # values and mix of the current layer, for its gate
        # of the current batch
        self._sums = Pending()  # sums (B,T) that are finite where the layer is
        self._not_finite: Sums[int] = Sums()  # layer → whether it has NaN or infinite numbers
        self._held = 0  # numbers that observables keep of its layers

    def requests(self, batch: Batch, observables: Sequence[Observable]) -> Sought:
        """Read every site in the order in which the forward pass reaches it, register tokens first.

        OutOfOrderError is to be thrown for an address that the pass does not reach.
        """
        batch = batch.with_registers(self.registers)
        wanted = {site for observable in observables for site in observable.sites}
        if not self.values_are_gated:
            wanted.discard("raw_value")
        stacking = [observable for observable in observables if observable.stacks]
        stacked = {"layer_out", *(site for observable in stacking for site in observable.sites)}
        stacks = _Stacks(batch, self.depth * len(stacked), partial(self._see_stack, stacking, batch))
        last_tensor: torch.Tensor | None = None
        added = torch.empty(0)  # the sum of a site's terms so far, (B,T,D)
        self._sums, self._not_finite, self._held = Pending(), Sums(), 0
        for layer in range(self.first, self.depth):
            block = self.family.block(layer)
            self._attended = []
            for site, index in _reading_order(block, wanted, self.family.gated):
                watching = [observable for observable in observables if site in observable.sites]
                if site == "raw_value":
                    (x, value), _ = yield self._inside(layer, RETROFIT, "inputs")
                    for observable in watching:
                        observable.watch_raw_value(layer, x, value, batch)
                    continue
                if site == NEURONS:
                    if part := self._feed_forwards.get(layer):
                        args, _ = yield Address(layer, part.path, "inputs")
                        for observable in watching:
                            observable.see_neurons(layer, part, args, batch)
                    continue
                if site in ("attention", "gate"):
                    see = self._see_attention if site == "attention" else self._see_gate
                    yield from see(layer, watching, batch)
                    continue
                terms = block.terms(site)
                scale = terms[index].scale
                path, _, end = terms[index].address.rpartition(".")
                tensor = first_tensor((yield Address(layer, path, end)))
                # a layer's input is the previous layer's output: reduce it once
                if tensor is not last_tensor or len(terms) > 1:
                    term = self.family.stream(tensor.detach()).view(*batch.token_ids.shape, -1)
                    term = term if scale == 1.0 else scale * term
                    added = added + term if index else term
                    reading, last_tensor = Reading(added, batch), tensor
                if index < len(terms) - 1:
                    continue
                if site in stacked:
                    stacks.add(layer, site, reading)
                for observable in watching:
                    if observable.backward:
                        observable.watch(layer, site, tensor, batch, scale)
                    elif not observable.stacks:
                        observable.see(layer, site, reading, batch)
            if layer == self.depth - 1 or self._held > HELD.get(self.model.device.type, HELD_ELSEWHERE):
                stacks.see_all()
                self._finish(observables, batch)

    def _finish(self, observables: Sequence[Observable], batch: Batch) -> None:
        """Reduce what observables keep of the batch."""
        for observable in observables:
            observable.finish(batch)
        for _, rows, pending in self._sums.take():
            sums = filled(pending["sums"], batch.on(pending["sums"].device, "valid"))
            add = partial(self._not_finite.add_each, [row["layer"] for row in rows])
            self._not_finite.receive(add, ~sums.sum((0, 2), dtype=torch.float64).isfinite())
        deliver([*observables, self])
        self._held = 0

    def _see_stack(self, observables: Sequence[Observable], batch: Batch, stack: SiteStack) -> None:
        for layer, site, index in stack.sites:
            if site == "layer_out":
                self._sums.add({"sums": stack.reading.norms[:, index]}, layer=layer)
        for observable in observables:
            sites = [each for each in stack.sites if each[1] in observable.sites]
            if sites:
                observable.see_stack(SiteStack(sites, stack.reading), batch)

    def _see_gate(self, layer: int, watching: Sequence[Observable], batch: Batch) -> Sought:
        """Pass values and gates to observables: a retrofit's gates, or the share of a head that the model's leaves."""
        if self.family.gated:
            if not self._attended:  # no observable has read this layer's attention
                for name in ("value", "mix"):
                    self._attended.append((yield self._tap(layer, name)).detach())
            value, mix = self._attended
            gate = share_of_gate(mix, (yield self._inside(layer, self.family.output, "input")).detach())
            value = value.transpose(1, 2)
        else:
            # multiplies values or heads' outputs; its inputs hold raw values
            (_, value), _ = yield self._inside(layer, RETROFIT, "inputs")
            value, gate = value.detach(), (yield self._inside(layer, RETROFIT, "output")).detach()
        for observable in watching:
            observable.see_gate(layer, gate, value, batch)

    def _see_attention(self, layer: int, watching: Sequence[Observable], batch: Batch) -> Sought:
        seam, seen = self.seams[layer], dict[str, torch.Tensor]()
        with suppress(OutOfOrderError):  # a tap that never ran
            for name in seam.order:
                if name != "mix":
                    seen[name] = yield self._tap(layer, name)
        length, is_whole = batch.token_ids.shape[1], batch.before is None
        if is_whole and seam.call is not None and {"key", "value"} <= seen.keys() and seen["key"].shape[2] > length:
            seam.call = _without_empty_slots(seam.call, seen, length)
        if reason := why_unread(seam, seen, batch.token_ids.shape, is_whole):
            raise SinkscopeError(f"layer {layer}: {reason}")
        assert seam.call is not None
        tensors = {name: getattr(seam.call, name) for name in ("mask", "sink_logits", "scores")}
        call = replace(seam.call, **{name: x.detach() for name, x in tensors.items() if x is not None})
        seam.call = replace(call, scores=None)  # T × T with its graph: freed as soon as it is read
        read = AttentionRead(**seen, call=call, batch=batch)
        plain = read.detached()
        self._sums.add({"sums": plain.lse.sum(1, dtype=torch.float64)}, layer=layer)
        self._held += STATISTICS * plain.lse.numel()
        for observable in watching:
            if not observable.backward:
                observable.see_attention(layer, plain, batch)
        backward = [observable for observable in watching if observable.backward]
        reading = [observable for observable in watching if observable.reads_mix]
        if backward or reading or self.family.gated:
            mix = yield self._tap(layer, "mix")
            self._attended = [plain.value, mix.detach()]
            for observable in reading:
                observable.see_mix(layer, plain, mix.detach(), batch)
            for observable in backward:
                observable.watch_attention(layer, read, mix, batch)

    def _inside(self, layer: int, name: str, end: str) -> Address:
        """Return the address of a submodule of a layer's attention module."""
        return Address(layer, f"{self.family.block(layer).attention}.{name}", end)

    def _tap(self, layer: int, name: str) -> Address:
        return self._inside(layer, f"{NAME}.{name}", "output")

    def addresses(self) -> Iterator[Address]:
        """Yield the addresses that `requests` may ask for; the seams have to be open."""
        taps = [f"{NAME}.{tap}.output" for tap in Seam.ORDER["interface"]]
        inside = (f"{RETROFIT}.inputs", f"{RETROFIT}.output", f"{self.family.output}.input", *taps)
        for layer, module in enumerate(self.family.layer_modules(self.model)):
            block = self.family.block(layer)
            addresses = {term.address for site in block.sites for term in block.terms(site)}
            addresses |= {f"{block.attention}.{name}" for name in inside}
            addresses |= {f"{self._feed_forwards[layer].path}.inputs"} if layer in self._feed_forwards else set()
            modules = dict(module.named_modules())
            for path, _, end in (address.rpartition(".") for address in addresses):
                if path in modules:
                    yield Address(layer, path, end)

    def check_finite(self) -> None:
        """Raise SinkscopeError for NaN or infinity, which in the tables would look like a head without a sink."""
        layers = [layer for layer, is_there in self._not_finite.items() if is_there]
        if layers:
            halves = self.model.dtype in (torch.float16, torch.bfloat16)
            advice = "try --dtype float32" if halves else "check its weights"
            raise SinkscopeError(f"layer {min(layers)}: the model itself gives NaN or infinite numbers; {advice}")


def _without_empty_slots(call: AttentionCall, seen: dict[str, torch.Tensor], length: int) -> AttentionCall:
    """Cut the keys and values in `seen` to those of the tokens, if no query sees the later ones.

    Those are the slots of a static cache that the prompt leaves empty (`generate` with cache_implementation="static").
    Without a mask, causal attention is aligned at the first key.
    """
    masks = [x for x in (call.mask, call.scores) if x is not None]
    if any(bool(is_visible(mask[..., length:]).any()) for mask in masks) or not (masks or call.causal):
        return call
    seen.update({name: seen[name][:, :, :length] for name in ("key", "value")})
    cut = {name: x[..., :length] for name in ("mask", "scores") if (x := getattr(call, name)) is not None}
    return replace(call, **cut)


class Tracer(Reader):
    """A model with its seams in place, wrapped by nnsight. Created by `open_tracer`. It computes outside autocast."""

    def __init__(self, model: PreTrainedModel, family: Family, seams: dict[int, Seam], first: int = 0) -> None:
        super().__init__(model, family, seams, first)
        with one_thread, warnings.catch_warnings():  # nnsight warns of submodules called `output`: see `part_of`
            warnings.filterwarnings("ignore", "Module '.*' has a submodule named", UserWarning)
            self.traced = Traced(model)

    def serving(self) -> AbstractContextManager[None]:
        """Serve what leaves the modules that are read to the traces of the block, after the hooks that they have."""
        layers = part_of(self.traced, self.family.layers)
        read = [part_of(layers[layer], path) for layer, path, end in self.addresses() if end == "output"]
        return serving([*read, part_of(self.traced, embedding_path(self.model)), self.traced])

    def forward(self, batch: Batch, observables: Sequence[Observable], again: bool = True) -> None:
        """Run one forward pass without logits. Raises SinkscopeError for NaN, or attention that is not recognized.

        With `again`, also run each further batch that an observable requests after this one.
        """
        with outside_autocast(), torch.no_grad(), self.traced.trace(**self._inputs(batch, with_logits=False)):
            self._read_layers(batch, observables)
        self.check_finite()
        if again:
            self._read_again(batch, observables)

    def _read_again(self, batch: Batch, observables: Sequence[Observable]) -> None:
        for observable in observables:
            for other in observable.again(batch):
                self.forward(other, [observable], again=False)

    def forward_with_loss(self, batch: Batch, observables: Sequence[Observable]) -> torch.Tensor:
        """Run one forward pass with logits and return the summed cross-entropy of each sequence, (B,).

        For an encoder, the observables see the original text, and a second pass over the masked text gives the loss.
        """
        if batch.masked is not None:
            if observables:
                self.forward(batch, observables)
            batch, observables = batch.masked, ()
        with outside_autocast(), torch.no_grad(), self.traced.trace(**self._inputs(batch)):
            self._read_layers(batch, observables)
            losses = save(loss_in_chunks(self.traced.after_hooks.logits, batch))
        self.check_finite()
        self._read_again(batch, observables)
        return losses

    def forward_backward(self, batch: Batch, observables: Sequence[Observable]) -> torch.Tensor:
        """Run one forward and backward pass and return the summed cross-entropy of each sequence, (B,).

        Gradients flow to the embeddings, so no weight gradient is ever allocated. If the activations of all layers do
        not fit into memory, each layer is computed once more in the backward pass instead. For an encoder, only the
        backward observables see the masked text, which defines the loss.
        """
        if batch.masked is not None:
            self.forward(batch, [observable for observable in observables if not observable.backward])
            batch, observables = batch.masked, [observable for observable in observables if observable.backward]
        fits = batch.token_ids.numel() <= tokens_that_fit(self.model, backward=True)
        recomputing = nullcontext() if fits else self._recomputing()
        with recomputing, outside_autocast(), torch.enable_grad(), self.traced.trace(**self._inputs(batch)):
            embedding = part_of(self.traced, embedding_path(self.model))
            output = embedding.after_hooks
            embeddings = first_tensor(output).requires_grad_(True)
            copied = embeddings.clone()  # some models change them in place
            embedding.after_hooks = (copied, *output[1:]) if isinstance(output, tuple) else copied
            self._read_layers(batch, observables)
            logits = self.traced.after_hooks.logits
            of_sequences, gradient = loss_and_gradient(logits.detach(), batch)
            torch.autograd.grad(logits, embeddings, gradient)
            losses = save(of_sequences)
        self._finish(observables, batch.with_registers(self.registers))
        self.check_finite()
        self._read_again(batch, observables)
        return losses

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return `logits_of` the model's output in a trace with the seams in place, for checks of parity."""
        with outside_autocast(), torch.no_grad(), self.traced.trace(**self._inputs(batch)):
            logits = save(logits_of(self.traced.after_hooks))
        return logits

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Within the block, keep no activations of a layer for the backward pass, which computes the layer once more.

        The observables' hooks are on the tensors of the first computation, and see the same gradients.
        """

        def checkpointed(layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            times = count()

            def compute(*args: Any, **kwargs: Any) -> Any:
                if next(times) == 0:
                    return forward(*args, **kwargs)
                seam, interleaver = self.seams.get(layer), self.traced.interleaver
                call = None if seam is None else seam.call
                interleaver.interleaving = False  # nothing is read this time
                try:
                    return forward(*args, **kwargs)
                finally:
                    interleaver.interleaving = True
                    if seam is not None:
                        seam.call = call

            return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        with ExitStack() as stack:
            for layer, module in enumerate(self.family.layer_modules(self.model)):
                forward = module.forward  # nnsight's
                stack.callback(setattr, module, "forward", forward)
                module.forward = partial(checkpointed, layer, forward)
            yield

    def _inputs(self, batch: Batch, with_logits: bool = True) -> dict[str, Any]:
        return model_inputs(self.model, batch, with_logits, self.family.first_position)

    def _read_layers(self, batch: Batch, observables: Sequence[Observable]) -> None:
        """Read every site from the current trace."""
        sought, layers = self.requests(batch, observables), part_of(self.traced, self.family.layers)
        with suppress(StopIteration):
            address = next(sought)
            while True:
                try:
                    part = part_of(layers[address.layer], address.path)
                    value = getattr(part, "after_hooks" if address.end == "output" else address.end)
                except OutOfOrderError as error:
                    sought.throw(error)
                address = sought.send(value)


def share_of_gate(mix: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Return the share of each head's output that a gate leaves: mix (B,T,H,d), taken (B,T,H·d) → (B,T,H).

    This is the mean of the gate over the head's channels, weighted by the squares of the gated entries.
    """
    before = upcast(mix)
    after = upcast(taken).view(before.shape)
    return (before * after).sum(-1) / before.square().sum(-1)


def _reading_order(block: Block, wanted: set[str], gated: bool) -> list[tuple[str, int]]:
    """Return the wanted sites of a layer and their terms in reading order, attention just before its output."""
    reached = {address: place for place, address in enumerate(block.sites.values())}
    present = {*wanted, "attn_out", "mlp_out", "layer_out"} & block.sites.keys()
    steps = [(site, index) for site in RESIDUAL_SITES if site in present for index in range(len(block.terms(site)))]
    order = sorted(steps, key=lambda step: reached[block.terms(step[0])[step[1]].address])
    if NEURONS in wanted:  # the last projection of the feed-forward network, whose output mlp_out is or follows
        order.insert([site in ("mlp_out", "layer_out") for site, _ in order].index(True), (NEURONS, 0))
    of_attention = ("raw_value", "attention", "gate") if gated else ATTENTION_SITES  # own gates follow attention
    if block.attention:
        terms = block.terms("attn_out") if "attn_out" in block.sites else ()
        part = block.attention.partition(".")[0]
        holding = [index for index, term in enumerate(terms) if term.address.startswith(part)]
        before = [step for step in order if step[0] == "layer_in"]  # used if the layer's sums are unknown
        step = ("attn_out", holding[0] if holding else 0)
        index = order.index(step) if step in order else len(before)
        order[index:index] = [(site, 0) for site in of_attention]
    return [step for step in order if step[0] in wanted]


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits (B,T,V), or the last hidden state (B,T,D) of an encoder without a head."""
    return output["logits"] if "logits" in output else output["last_hidden_state"]


def model_inputs(
    model: PreTrainedModel, batch: Batch, with_logits: bool = True, first_position: int | None = 0
) -> dict[str, Any]:
    """Return the arguments of a call of the model on a batch, for all logits or, if it has that option, the last."""
    device, parameters = input_device(model), inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"input_ids": batch.on(device, "token_ids"), "use_cache": False}
    if batch.valid is not None:
        inputs["attention_mask"] = batch.on(device, "attention_mask")
        # only with padding on the left; otherwise the model's own are right, which may not start at 0
        if "position_ids" in parameters and first_position is not None and bool(batch.start.any()):
            inputs["position_ids"] = batch.on(device, "position_ids") + first_position
    for name, x in batch.pictures.items():
        inputs[name] = x.to(device, model.dtype if x.is_floating_point() else x.dtype)
    if not with_logits and "logits_to_keep" in parameters:
        # A tensor, because for a number Gemma 4 leaves out all other tokens in its last layers, and others slice a
        # view, for which torch copies lm_head once per sequence (bfloat16 on CPUs: 80 s in place of 0.3 s). Hooks of a
        # model on several devices would move a tensor to the first of them, and not to that of the last layer.
        spread_by_accelerate = len(set(getattr(model, "hf_device_map", {}).values())) > 1  # it may offload weights
        is_spread = spread_by_accelerate or len({parameter.device for parameter in model.parameters()}) > 1
        inputs["logits_to_keep"] = 1 if is_spread else torch.full((1,), -1, device=device)
    return inputs


class _Stacks:
    """Collects copies of sites in one tensor until it is full: a kernel then reduces many of them in one launch.

    Where copies do not pay, for large tensors, each site is seen at once. Models may change a tensor in place after it
    has been read, so that it cannot be kept without a copy.
    """

    def __init__(self, batch: Batch, most: int, see: Callable[[SiteStack], None]) -> None:
        self.batch = batch
        self.most = most  # the number of tensors to come
        self.see = see
        self.last: tuple[Reading | None, Reading] = (None, Reading(torch.empty(0), batch))
        self.copies: dict[tuple, torch.Tensor] = {}  # by shape, dtype and device
        self.sites: dict[tuple, list[tuple[int, str, int]]] = defaultdict(list)

    def add(self, layer: int, site: str, reading: Reading) -> None:
        x, is_new = reading.tensor, reading is not self.last[0]
        kind = x.shape, x.dtype, x.device
        if is_new:
            self.last = reading, Reading(x.unsqueeze(1), self.batch)
        room = min(self.most, copied_entries(x.device) // x.numel())
        if room < 2:
            self.see(SiteStack([(layer, site, 0)], self.last[1]))
            return
        if kind not in self.copies:
            self.copies[kind] = x.new_empty(len(x), room, *x.shape[1:])
        index = self.sites[kind][-1][2] if self.sites[kind] else -1
        if is_new:
            if index == room - 1:
                self._see(kind)
            index = (index + 1) % room
            self.copies[kind][:, index] = x
        self.sites[kind].append((layer, site, index))

    def see_all(self) -> None:
        for kind in self.copies:
            if self.sites[kind]:
                self._see(kind)
        self.last = (None, self.last[1])  # its copy has been seen

    def _see(self, kind: tuple) -> None:
        sites = self.sites.pop(kind)
        self.see(SiteStack(sites, Reading(self.copies[kind][:, : sites[-1][2] + 1], self.batch)))


@contextmanager
def open_tracer(
    model: PreTrainedModel,
    family: Family,
    kernel: str = "sdpa",
    interventions: Iterable[Intervention] = (),
    beginning: Beginning | None = None,
) -> Iterator[Tracer]:
    """Install the seams, apply the interventions in their order and wrap the model, until the end of the block.

    Afterwards the model is restored bit for bit. With a `beginning`, earlier layers neither run nor are read. Raises
    InputError if an intervention does not apply or would change nothing, and SinkscopeError if one is open already.
    """
    with (
        open_seam(model, family, kernel) as seams,
        nullcontext() if beginning is None else begun(family.layer_modules(model), beginning),
        applied(Target(model, family, seams), interventions),
        # innermost: nnsight wraps modules that interventions have wrapped, so it sees the changed tensors, and its
        # own changes of `forward` are removed first
        unchanged_after(model),
    ):
        tracer = Tracer(model, family, seams, 0 if beginning is None else beginning.layer)
        with tracer.serving():
            yield tracer
