"""One pass over a run's sequences: batch after batch through the tracer, in batches that fit into memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from accelerate.utils import find_executable_batch_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sinkscope.errors import SinkscopeError
from sinkscope.measuring.observables.observable import Observable
from sinkscope.measuring.tracer import Tracer
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 16384}  # where --batch-size auto starts

Step = Callable[[Batch, Sequence[Observable]], float | None]  # → the batch's summed loss, where it makes one
Kind = TypeVar("Kind", bound=Observable)


@dataclass(frozen=True)
class Pass(Generic[Kind]):
    """The result of a pass over all batches."""

    observables: list[Kind]
    loss: float  # summed over all predicted tokens
    batch_size: int  # that fitted into memory


def pass_over(
    tracer: Tracer,
    inputs: TokenInputs,
    fresh: Callable[[], list[Kind]],
    step: Step,
    batch_size: int | Literal["auto"],
    costs: int = 1,
    console: Console | None = None,
) -> Pass[Kind]:
    """Put every batch through `step`; out of memory, start again with new observables and half the batch.

    Args:
        tracer: of the model.
        inputs: the sequences.
        fresh: makes the observables.
        step: one of the tracer's methods: a batch and the observables → its summed loss, if it has one.
        batch_size: sequences in a batch; "auto" begins with TOKENS_PER_BATCH.
        costs: memory of a step, in forward passes.
        console: for a progress bar.

    Raises:
        SinkscopeError: not even one sequence fits into memory.
    """
    device = tracer.model.device.type
    tokens = TOKENS_PER_BATCH.get(device, TOKENS_PER_BATCH["cpu"]) // costs
    wanted = max(1, tokens // inputs.longest) if batch_size == "auto" else batch_size
    tried = 0

    def all_batches(size: int) -> Pass[Kind]:
        nonlocal tried
        tried = size
        observables, loss = fresh(), 0.0
        with _progress(console) as advance:
            for batch in batches_of(inputs, size):
                loss += step(batch, observables) or 0.0
                advance(batch.first + len(batch.token_ids), len(inputs))
        return Pass(observables, loss, size)

    attempt = find_executable_batch_size(
        all_batches, starting_batch_size=min(wanted, len(inputs)), reduce_batch_size_fn=lambda: tried // 2
    )
    try:
        return attempt()
    except RuntimeError as error:
        if "No executable batch size" not in str(error):
            raise
        raise SinkscopeError(
            "out of memory even with one sequence a batch: "
            "take a shorter --seq-len, --dtype bfloat16 or --device-map auto"
        ) from None


def batches_of(inputs: TokenInputs, batch_size: int, padding_side: str = "right") -> Iterator[Batch]:
    first = 0
    for ids, mask in inputs.batches(batch_size, padding_side=padding_side):
        yield Batch(ids, mask, first)
        first += len(ids)


def _progress(console: Console | None) -> Any:
    """A context that gives advance(done, total); silent without a console."""
    if console is None or console.quiet or not console.is_terminal:
        return nullcontext(lambda done, total: None)
    return _Bar(console)


class _Bar:
    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("sequences"), TimeRemainingColumn(),
            console=console, transient=True,
        )  # fmt: skip
        self.task = self.progress.add_task("measuring", total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self.progress.start()
        return lambda done, total: self.progress.update(self.task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
