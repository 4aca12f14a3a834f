"""What `retrofit` or `train` was asked for, and the checks before anything is trained."""

import copy
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.family import Family
from sinkscope.models.positions import known_positions
from sinkscope.options.measuring import RunConfig
from sinkscope.options.training import ArmOptions, TrainingConfig
from sinkscope.results.folders import alone_in
from sinkscope.results.resume import check_resumable
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.training.arms import Method
from sinkscope.training.sharding import by_the_first
from sinkscope.training.trainer import check_trainable

RENEWED = ("figures", "comparison")  # folders of all arms together: written anew whenever the command goes on


@dataclass(frozen=True)
class Plan:
    """What `retrofit` or `train` was asked for.

    Attributes:
        command: its name.
        folder: where it writes.
        options: the entries of run.json that decide its numbers: the folder is resumed only with the same ones.
        training: how each arm is trained.
        measuring: how models are loaded and measured.
        overwrite: begin anew.
        console: for what is said meanwhile.
        start: when the command began.
    """

    command: str
    folder: Path
    options: dict[str, Any]
    training: TrainingConfig
    measuring: RunConfig
    overwrite: bool
    console: Console
    # options that a folder of an older version does not record count as given with these values
    defaults: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] | None = None  # of a recipe
    page: bool = True  # write index.html
    figures: bool = True  # draw them
    start: float = field(default_factory=time.time)

    @classmethod
    def of(
        cls,
        command: str,
        asked: ArmOptions,
        out: str | os.PathLike[str],
        overwrite: bool,
        quiet: bool,
        record: Mapping[str, Any] | None,
        page: bool,
        figures: bool = True,
        **facts: Any,
    ) -> "Plan":
        """The plan of either command; `facts` are what else decides its numbers."""
        state = PartialState()
        # methods are added to a folder one after the other: each arm's is recorded with the arm
        own = {"config": asked.model_dump(mode="json", exclude={"method"})}
        options = own | {"processes": state.num_processes} | facts
        defaults = {"config": type(asked)().model_dump(mode="json", exclude={"method"})}
        console = Console(stderr=True, quiet=quiet or not state.is_main_process)
        return cls(
            command=command,
            folder=Path(out),
            options=options,
            training=asked.training,
            measuring=asked.measuring,
            overwrite=overwrite,
            console=console,
            defaults=defaults,
            record=record,
            page=page,
            figures=figures,
        )

    @contextmanager
    def own_folder(self, *reads: str | None) -> Iterator[None]:
        """Have the folder to this command, which may be several processes.

        Args:
            reads: as for `check_output`.

        Raises:
            InputError: it cannot be written, was made with other options, or another command is writing it.
        """
        with ExitStack() as stack:

            def take() -> None:
                stack.enter_context(alone_in(self.folder))
                check_resumable(self.folder, self.command, self.options, self.overwrite, self.defaults, reads, RENEWED)

            by_the_first(take)
            yield

    def check_methods(self, methods: Iterable[Method], model: PreTrainedModel, family: Family) -> None:
        """Raise InputError for a method that cannot be trained on this model, before hours of training another."""
        if not family.causal:
            raise InputError(f"'{family.name}' attends both ways, and training here predicts each token's successor")
        limit, length = known_positions(model, family), self.training.block_length
        for method in methods:
            trial = method.built_into(copy.deepcopy(model), family, self.training.seed)
            try:
                check_trainable(trial, self.training.only_new)
            except InputError as error:
                raise InputError(f"--method {method.label}: {error}") from None
            registers = registers_before(trial)
            if limit is not None and length + registers > limit:
                raise InputError(
                    f"--method {method.label}: blocks of {length} tokens and {registers} registers are beyond the "
                    f"model's {limit} positions: take a --block-length of at most {limit - registers}"
                )
