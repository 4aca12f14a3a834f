"""Measures the calls of a model that the user's own code makes: in a training loop, or where it is served.

    with sinkscope.watch(model) as seen:
        loss = model(**batch).loss
    seen.sink_rate, seen.massive

The user's own computation does not change: hooks read the sites of the layers, and the taps of attention run on
the same queries, keys and values after the model's own function, without gradient (`open_seam` with `aside`). Hooks and
taps are in the model only while a call is measured, so that a backward pass that computes a layer once more (gradient
checkpointing), also after the block, runs the model as it is.
"""

import inspect
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from sinkscope.attention.kernels import is_visible
from sinkscope.attention.seam import open_seam
from sinkscope.attention.taps import NAME
from sinkscope.errors import InputError, SinkscopeError, counted, described, was_interrupted
from sinkscope.measuring.decoding import Decoding, ends_of, thought_of
from sinkscope.measuring.measure import attention_facts
from sinkscope.measuring.nnsight import OutOfOrderError
from sinkscope.measuring.observables import OBSERVABLES, check_names
from sinkscope.measuring.observables.observable import Observable, accumulated
from sinkscope.measuring.parity import check_beforehand
from sinkscope.measuring.passes import tables_of
from sinkscope.measuring.subject import Subject, load_model, position_limit, row_or_calibrated
from sinkscope.measuring.summary import MeasuredTables, summarize
from sinkscope.measuring.tables import publish
from sinkscope.measuring.tracer import Address, Reader, Sought
from sinkscope.models.edits import first_argument
from sinkscope.models.family import Family, input_device
from sinkscope.models.in_memory import called_uncompiled, on_cpu_by_default, outside_autocast, undisturbed, unwrapped
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import ObservableOptions, make_config
from sinkscope.options.option import checked
from sinkscope.options.signatures import spelled_for_python
from sinkscope.results.metrics import METRICS, MISSING, SHORT_METRICS, notice_without_rate
from sinkscope.results.run import RunData
from sinkscope.results.tables import of_whole_model
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

CONDITION = "watched"  # the condition in tables
CHUNKED = "a prompt in several chunks: none of its calls has it complete"


class Largest(NamedTuple):
    """The largest entry of the layers' outputs."""

    value: float
    layer: int
    coordinate: int
    sequence: int
    position: int
    token_id: int
    token: str


class NotMeasured(Exception):
    """The reason why a call is not measured."""


class Watched:
    """The measurements of all calls in a block of `watch` so far."""

    def __init__(
        self, loaded: LoadedModel, family: Family, settings: ObservableOptions, decoding: bool | Literal["only"] = False
    ) -> None:
        self.loaded, self.family, self.settings, self.decoding = loaded, family, settings, decoding
        self.skipped: Counter[str] = Counter()  # reason → the number of calls that are not measured for it
        self._names = [] if decoding == "only" else _observables(loaded, family, settings.observables)
        self._sequences: dict[int, np.ndarray] = {}  # number → token ids
        self._observables: list[Observable] = []
        self._added = 0  # measured calls whose numbers are in `_observables`
        self._next = 0  # number of the next sequence
        # calls with a KV cache, which the next call may continue: then this one had only the first chunk of a prompt
        self._open: list[tuple[weakref.ref[Any], _Hooks]] = []
        self._attended: tuple[tuple[float, ...], dict[str, list[int]]] = (), {}
        self._call: _Hooks | None = None  # the one that is being measured
        self._in_steps: _Hooks | None = None  # stay in the model until the end of the block
        self._decoded: list[tuple[Callable[[], Any], Decoding]] = []  # by the KV cache, until it is emptied
        self._lock = threading.Lock()  # several threads may call the model

    def __repr__(self) -> str:
        """Return the number of calls, the main numbers once a call is complete, and why others are not measured."""
        numbers = ""
        if self._added and not self._open:  # reading the numbers of an open call would end its prompt
            texts = {METRICS[name].short: METRICS[name].text(self.metric(name)) for name in SHORT_METRICS}
            numbers = "".join(f", {label} {text}" for label, text in texts.items() if text != MISSING)
        reasons = "".join(f"\nnot measured: {reason} ({count} ×)" for reason, count in self.skipped.items())
        steps = f", {counted(self.steps, 'decoding step')}" if self.decoding else ""
        return f"Watched {self.loaded.name}: {counted(self.calls, 'measured call')}{steps}{numbers}{reasons}"

    @property
    def calls(self) -> int:
        """The number of measured calls."""
        return self._added + len(self._open)

    @property
    def steps(self) -> int:
        """The number of measured decoding steps."""
        return sum(decoding.steps for _, decoding in self._decoded)

    @property
    def sink_rate(self) -> float:
        """The share of heads in which position 0 is a sink; NaN if uniform attention would make it one (`analyze`)."""
        return self.metric("sink_rate")

    @property
    def massive(self) -> Largest:
        """The largest entry of the layers' outputs, with its layer, coordinate and token."""
        table = self.tables["massive"]
        row = table.loc[[table["value"].abs().idxmax()], list(Largest._fields)]
        return Largest(*next(row.itertuples(index=False)))

    def metric(self, name: str, layer: int = -1) -> float:
        """Return a metric of `sinkscope list metrics`, by default of the whole model; NaN if it is not measured."""
        return RunData({}, self.tables).metric(name, layer)

    @property
    def tables(self) -> Mapping[str, pd.DataFrame]:
        """The tables of `analyze` on the sequences of all measured calls. Raises SinkscopeError before the first.

        With `decoding` also the tables `decoding` and `decoding_sinks` on the steps.
        """
        self._add_open_calls()
        if not self._observables and not self.steps:
            reasons = "; ".join(f"{reason} ({count} ×)" for reason, count in self.skipped.items())
            raise SinkscopeError(f"no call of the model was measured{reasons and ': '}{reasons}")
        return self._tables

    def decoded(self) -> dict[str, pd.DataFrame]:
        """Return the raw tables of the decoding steps, by number of sequence; none before the first step."""
        made = [tables for _, decoding in self._decoded if (tables := decoding.tables())]
        return {name: pd.concat([tables[name] for tables in made], ignore_index=True) for name in (made or [{}])[0]}

    @cached_property
    def _tables(self) -> dict[str, pd.DataFrame]:
        numbers = sorted(self._sequences)
        decoded = self.decoded()
        # sequences whose prompt was not measured come last
        others = set(decoded["decoding"]["sequence"]) - set(numbers) if decoded else ()
        places = {number: place for place, number in enumerate([*numbers, *sorted(others)])}
        raw = tables_of(self._observables)
        if raw:
            inputs = TokenInputs(CONDITION, tuple(self._sequences[number] for number in numbers), "", "")
            within = {name: table for name, table in raw.items() if "position" in table}
            raw |= {name: table[table["position"] < inputs.longest] for name, table in within.items()}
        raw |= decoded
        in_order = {name: table for name, table in raw.items() if "sequence" in table}
        raw |= {name: table.assign(sequence=table["sequence"].map(places)) for name, table in in_order.items()}
        tables = publish(raw, self.loaded, CONDITION)
        if not numbers:
            return tables
        scaling, outside = self._attended
        summary = summarize(MeasuredTables(tables, inputs, self.family, scaling, outside, self.settings))
        if notice := notice_without_rate(of_whole_model(summary), self.settings.epsilon):
            warnings.warn(notice, stacklevel=4)  # the user's line, past `tables` and the cache
        return tables | publish({"summary": summary}, self.loaded, CONDITION)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the calls of the model in the block."""
        network = self.loaded.model
        with (
            network.register_forward_pre_hook(self._begin, with_kwargs=True),
            network.register_forward_hook(self._end, always_call=True),
        ):
            try:
                yield
            finally:
                self._end(network, (), None)  # after an interrupt in a call, torch does not run the hook
                if self._in_steps is not None:
                    self._in_steps.close()
                self._add_open_calls()

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin to read a call of the model, unless there is a reason not to."""
        if not self._lock.acquire(blocking=False):
            self.skipped["another call was being measured"] += 1
            return
        try:
            arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
            arguments |= arguments.pop("kwargs", {})
            self._continue(arguments)
            if self.decoding and (step := _step(arguments, registers_before(module))) is not None:
                decoding = self._continued(arguments["past_key_values"], step)
                decoding.begin(step)
                self._in_steps = self._in_steps or _Hooks(self.loaded, self.family)
                self._in_steps.begin(step, [decoding])
                self._call = self._in_steps
                return
            batch = _batch(arguments, self._next)
            observables = [OBSERVABLES[name](self.settings) for name in self._names]
            self._call = _Hooks(self.loaded, self.family)
            self._call.begin(batch, observables)
        except Exception as error:
            self._skip(error)
            self._lock.release()

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Add what was read of a call; also called if the call has failed."""
        call = self._call
        if call is None or call.thread != threading.get_ident():
            return
        self._call = None
        try:
            if call is not self._in_steps:
                call.close()
            call.end()
            if call is self._in_steps:
                vars(self).pop("_tables", None)
                return
            self._next += len(call.batch.token_ids)
            cache = getattr(output, "past_key_values", None)
            if hasattr(cache, "get_seq_length"):
                self._open.append((weakref.ref(cache), call))
                vars(self).pop("_tables", None)
            else:
                self._add(call)
        except Exception as error:
            self._skip(error)
        finally:
            self._lock.release()

    def _continue(self, arguments: Mapping[str, Any]) -> None:
        """Drop an open call whose prompt this call continues, and add the calls that can no longer be continued.

        A call with a single token is a decoding step, so the prompt was complete.
        """
        cache, ids = arguments.get("past_key_values"), arguments.get("input_ids")
        still_open = []
        for reference, call in self._open:
            held = reference()
            if held is None or (held is cache and not cache.get_seq_length()):
                self._add(call)
            elif held is not cache:
                still_open.append((reference, call))
            elif isinstance(ids, torch.Tensor) and ids.shape[1] == 1:
                self._add(call)
                if self.decoding:
                    self._decoded.append((reference, self._decoding(call.batch)))
            else:
                self.skipped[CHUNKED] += 1
        self._open = still_open
        for place, (followed, decoding) in enumerate(self._decoded):
            held = followed()
            if held is None or (held is cache and not cache.get_seq_length()):
                decoding.release()
                self._decoded[place] = _no_cache, decoding

    def _continued(self, cache: Any, step: Batch) -> Decoding:
        """Return the decoding that this step of a cache continues, or begins where the prompt was not measured."""
        for reference, decoding in self._decoded:
            if reference() is cache:
                return decoding
        decoding = self._decoding(Batch(step.token_ids[:, :0], step.attention_mask[:, :0], self._next))
        self._next += len(step.token_ids)
        self._decoded.append((weakref.ref(cache), decoding))
        return decoding

    def _decoding(self, prompt: Batch) -> Decoding:
        return Decoding(self.settings, prompt, ends_of(self.loaded.model), thought_of(self.loaded.tokenizer))

    def _add_open_calls(self) -> None:
        """Add all open calls."""
        while self._open:
            self._add(self._open.pop(0)[1])

    def _add(self, call: "_Hooks") -> None:
        batch = call.batch
        try:
            for observable, new in zip(self._observables, call.observables, strict=False):  # none before the first call
                for name, accumulator in accumulated(observable).items():
                    accumulator.merge(vars(new)[name])
            self._observables = self._observables or call.observables
            rows = zip(batch.token_ids.numpy(), batch.start.tolist(), batch.lengths.tolist(), strict=True)
            texts = (ids[start : start + length] for ids, start, length in rows)
            self._sequences.update(enumerate(texts, batch.first))
            self._attended = attention_facts(call.reader)
            self._added += 1
            vars(self).pop("_tables", None)
        except Exception as error:
            self._skip(error)

    def _skip(self, error: Exception) -> None:
        if was_interrupted(error):
            raise error
        known = isinstance(error, NotMeasured | InputError | SinkscopeError)
        self.skipped[str(error) if known else described(error)] += 1


def _no_cache() -> None:
    """Take the place of a reference to a cache that another text may fill again."""


class _Hooks:
    """The hooks and taps in a model, which send the values of a call to its reader while one is read."""

    def __init__(self, loaded: LoadedModel, family: Family) -> None:
        self.batch, self.observables = Batch(torch.empty(0, 0), torch.empty(0, 0)), list[Observable]()
        self.thread = 0
        self.failure: Exception | None = None
        self._awaited: tuple[nn.Module | None, str] = None, ""
        with ExitStack() as stack:
            attentions = family.attentions(loaded.model)
            seams = {layer: seam for layer, part in attentions.items() if (seam := getattr(part, NAME, None))}
            # an intervention, or another block of `watch`, has opened them
            seams = seams or stack.enter_context(open_seam(loaded.model, family, aside=True))
            self.reader = Reader(loaded.model, family, seams)
            self._layers = family.layer_modules(loaded.model)
            read = {self._layers[layer].get_submodule(path) for layer, path, _ in self.reader.addresses()}
            for module in read:
                stack.enter_context(module.register_forward_pre_hook(self._before, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(self._after))
            self.close = stack.pop_all().close

    def begin(self, batch: Batch, observables: list[Observable]) -> None:
        """Read the next call into the observables."""
        self.batch, self.observables = batch, observables
        self.thread, self.failure = threading.get_ident(), None
        self._sought: Sought = self.reader.requests(batch, observables)
        self._advance(partial(self._sought.send, None))

    def end(self) -> None:
        """End the call. Raises the exception that ended the reading, or SinkscopeError for an incomplete one."""
        if self.failure is None and self._awaited[0] is not None:
            self._advance(partial(self._sought.throw, OutOfOrderError("the call ended before its last layer")))
        self._awaited = None, ""
        if self.failure is not None:
            raise self.failure
        self.reader.check_finite()

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._send(module, {"input": lambda: first_argument(args, kwargs), "inputs": lambda: (args, kwargs)})

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._send(module, {"output": lambda: output})

    def _send(self, module: nn.Module, values: Mapping[str, Callable[[], Any]]) -> None:
        """Send the reader the module's values at the ends that it awaits, one after the other."""
        while self._awaited[0] is module and self._awaited[1] in values and self.thread == threading.get_ident():
            self._advance(partial(self._sought.send, values[self._awaited[1]]()))

    def _advance(self, go_on: Callable[[], Address]) -> None:
        """Let the reader continue to the next value that it seeks; its exceptions do not reach the user's call."""
        self._awaited = None, ""
        try:
            with torch.no_grad(), outside_autocast(), on_cpu_by_default():
                layer, path, end = go_on()
            self._awaited = self._layers[layer].get_submodule(path), end
        except StopIteration:
            pass
        except Exception as error:
            self.failure = error


def _batch(arguments: Mapping[str, Any], first: int) -> Batch:
    """Return the sequences of a call with these arguments. Raises NotMeasured if they are not complete sequences."""
    ids, mask, cache = (arguments.get(name) for name in ("input_ids", "attention_mask", "past_key_values"))
    if not isinstance(ids, torch.Tensor):
        raise NotMeasured("a call without input_ids")
    if cache is not None and (cache.get_seq_length() if hasattr(cache, "get_seq_length") else len(cache)):
        raise NotMeasured("a decoding step: its queries are not complete sequences, as those of the prefill are")
    if ids.shape[1] < 2:
        raise NotMeasured("a single token")
    if isinstance(mask, Mapping):  # by kind of layer, as `generate` makes them for a static cache; None: all is seen
        mask = next((of_kind for of_kind in mask.values() if of_kind is not None), None)
    if mask is None:
        mask = torch.ones_like(ids)
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:
        mask = _tokens_seen(mask)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise NotMeasured("an attention mask of other than one number for each token")
    beginnings = F.pad(mask.long(), (1, 0)).diff() == 1
    positions, ends = arguments.get("position_ids"), arguments.get("cu_seq_lens_q")
    if positions is not None and positions.dim() <= 2:
        # where they restart another sequence begins, and where they jump tokens are missing
        beginnings |= F.pad((positions.diff() != 1) & mask.bool()[:, 1:] & mask.bool()[:, :-1], (1, 0))
    is_packed = ends is not None and len(ends) > 2
    if is_packed or not bool((beginnings.sum(1) == 1).all()):
        raise NotMeasured("several sequences in one row, or none")
    return Batch(ids.detach().cpu(), mask.long().detach().cpu(), first)


def _step(arguments: Mapping[str, Any], registers: int) -> Batch | None:
    """Return the tokens of a decoding step, one for each sequence; None for another call.

    The register tokens are in the cache, and not in the mask or the positions.
    """
    ids, mask, cache = (arguments.get(name) for name in ("input_ids", "attention_mask", "past_key_values"))
    before = cache.get_seq_length() if cache is not None and hasattr(cache, "get_seq_length") else 0
    if not before or not isinstance(ids, torch.Tensor) or ids.shape[1] != 1:
        return None
    positions = arguments.get("position_ids")
    places = torch.full(ids.shape[:1], int(before))
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] > 1:
        places = mask.sum(1) - 1 + registers  # without padding
    elif isinstance(positions, torch.Tensor) and positions.dim() == 2:
        places = positions[:, -1].expand(len(ids)) + registers
    return Batch(ids.cpu(), torch.ones_like(ids, device="cpu"), before=places.cpu().long())


def _tokens_seen(mask: torch.Tensor) -> torch.Tensor | None:
    """Return which tokens are real (B,T) according to a mask (B,1,T,S); None if it is not causal over one sequence.

    A real token sees itself. It sees all real tokens before it, or in a sliding window the last of them.
    """
    visible = is_visible(mask)[:, 0]
    real = visible.diagonal(dim1=1, dim2=2)
    query, key = (torch.arange(size, device=mask.device) for size in visible.shape[1:])
    distance = query[:, None] - key
    expected = (distance >= 0) & (distance < visible.sum(-1).max()) & F.pad(real, (0, len(key) - len(query)))[:, None]
    return real.long() if torch.equal(visible & real[..., None], expected & real[..., None]) else None


def _observables(loaded: LoadedModel, family: Family, named: tuple[str, ...] | None) -> list[str]:
    """Return the named observables, or all that `analyze` measures in a forward pass, without computing more."""
    check_names(named)
    reasons = {
        name: kind.inapplicable(loaded.model, family)
        for name, kind in OBSERVABLES.items()
        if not (kind.backward or kind.after or kind.of_equal_tokens)
        and (kind.prepare, kind.again) == (Observable.prepare, Observable.again)
    }
    for name in named or ():
        if reason := reasons.get(name, "it takes more than the forward pass itself: use `analyze`"):
            raise InputError(f"observables: {name} cannot be watched in {loaded.name}: {reason}")
    return list(named or [name for name in reasons if reasons[name] is None and OBSERVABLES[name].by_default])


@contextmanager
def watch(
    model: nn.Module, *, tokenizer: PreTrainedTokenizerBase | None = None, decoding: bool = False, **options: Any
) -> Iterator[Watched]:
    """Measure a loaded model while your own code calls it, as `analyze` does, in the same forward pass.

        for batch in data:
            with sinkscope.watch(model) as seen:
                model(**batch)
            print(seen.sink_rate, seen.massive)

    Outputs, gradients, random numbers and weights stay as they are without the block, bit for bit: in eval and in
    training mode, under autocast, with gradient checkpointing, and inside `intervening`. A compiled model runs
    uncompiled in the block. Of `generate` and of serving with a KV cache, the pass over each prompt is measured;
    decoding steps, and prompts that are read in several chunks, are not, nor are those of assisted generation, whose
    checks of several tokens look like chunks. `seen.calls` counts the measured calls, `seen.skipped` the others by
    their reason: a decoding step (without `decoding`), packed sequences, inputs other than token ids, attention that is
    not recognized, NaN.
    A block keeps the ids and the tables of all its calls: a server opens one for some of its calls, or for a while.

    Args:
        model: A transformers model, also wrapped by torch.compile, PEFT, DistributedDataParallel, or DataParallel on
            one device.
        tokenizer: For the texts of tokens.
        decoding: Whether steps of decoding are measured, too: one new token for each sequence of a KV cache, dynamic,
            static or sliding. `seen.tables` then has `decoding` and `decoding_sinks`, whose rows equal those of one
            full pass. A sequence ends with the model's end token; beams that change places are not followed. The hooks
            stay in the model from the first step to the end of the block.
        **options: `observables` (by default all of one forward pass), `positions`, `window` and `epsilon`, as for
            `analyze`.

    Raises:
        InputError: An option is wrong, or the model cannot be measured, such as one that FSDP shards.
        SinkscopeError: The model's attention differs from sinkscope's computation. Within the block nothing is raised
            in the model's calls; numbers raise it if no call was measured.
    """
    with spelled_for_python(ObservableOptions):
        settings = checked(ObservableOptions, options)
    loaded = load_model(unwrapped(model, changed=True), tokenizer, make_config())
    network = loaded.model
    with undisturbed(network):
        family, notices = row_or_calibrated(network)
    check_beforehand(network, family, is_calibrated=bool(notices))
    seen = Watched(loaded, family, settings, decoding)
    with called_uncompiled(network), seen.watching():
        yield seen


def check_decoding(subject: Subject, count: int) -> None:
    """Raise InputError if a model cannot decode `count` tokens after its text."""
    model, family, longest = subject.loaded.model, subject.family, subject.inputs.longest
    if not (family.causal and model.can_generate()):
        raise InputError(f"--generate {count}: {subject.loaded.name} does not generate text")
    if family.without_attention:
        raise InputError(f"--generate {count}: {subject.loaded.name}: {family.without_attention}")
    limit = position_limit(model, family)
    if limit is not None and longest + count > limit:
        raise InputError(f"--generate {count}: {subject.loaded.name} has {limit} positions, and the text {longest}")


@contextmanager
def _generating(model: Any, how: GenerationConfig) -> Iterator[None]:
    """Give a model this configuration: from its own, `generate` would take what `how` leaves open, as penalties."""
    before, model.generation_config = model.generation_config, how
    try:
        yield
    finally:
        model.generation_config = before


@torch.no_grad()
def decode(subject: Subject, settings: ObservableOptions, count: int, batch_size: int) -> dict[str, pd.DataFrame]:
    """Continue each sequence greedily by `count` tokens or to its end, and return the raw tables of their steps.

    Raises:
        SinkscopeError: A step cannot be measured.
    """
    model = subject.loaded.model
    network: Any = model  # typed as a module
    ends = sorted(ends_of(model))
    # the token after the last measured one is not read
    how = GenerationConfig(
        do_sample=False, max_new_tokens=count + 1, eos_token_id=ends or None, pad_token_id=(ends or [0])[0]
    )
    seen = Watched(subject.loaded, subject.family, settings, decoding="only")
    with called_uncompiled(model), _generating(model, how), seen.watching():
        for batch in subject.inputs.batches(batch_size, padding_side="left"):
            ids, mask = (x.to(input_device(model)) for x in (batch.token_ids, batch.attention_mask))
            network.generate(ids, attention_mask=mask, generation_config=how)
    if seen.skipped:
        raise SinkscopeError(f"--generate {count}: {next(iter(seen.skipped))}")
    return seen.decoded()
