"""One pass over a run's sequences: batch after batch through the tracer, in batches that fit into memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True)
class Pass:
    """What came of one: the observables full, the loss summed over all predicted tokens, and the batch size used."""

    observables: list[Observable]
    loss: float
    batch_size: int


def pass_over(
    tracer: Tracer,
    inputs: TokenInputs,
    fresh: Callable[[], list[Observable]],
    step: Step,
    batch_size: int | Literal["auto"],
    costs: int = 1,
    console: Console | None = None,
) -> Pass:
    """Every batch through `step`. Out of memory: again from the start, with `fresh` observables and half the batch.

    `costs`: how many times the memory of a forward pass a step takes, about.

    Errors: SinkscopeError where one sequence is too much.
    """
    device = tracer.model.device.type
    tokens = TOKENS_PER_BATCH.get(device, TOKENS_PER_BATCH["cpu"]) // costs
    wanted = max(1, tokens // inputs.longest) if batch_size == "auto" else batch_size
    tried = 0

    def all_batches(size: int) -> Pass:
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
