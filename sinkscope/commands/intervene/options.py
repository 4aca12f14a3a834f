"""The options of `intervene`."""

import re
from hashlib import sha256
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import field_validator, model_validator

from sinkscope.options.measuring import ALWAYS, ControlOptions, RunConfig
from sinkscope.options.option import as_folder_name, option, text_as_tuple

LONGEST = 100  # characters of the arms in the name of a run folder


class InterveneOptions(ControlOptions, RunConfig):
    """Remove, move or replace parts that may cause the sink, and measure before, after, and
    under random controls.

    An intervention is NAME or NAME:key=value,… as in zero-massive:layers=11,coordinates=138,447 (lists) or
    nullify-query-bias:layers=1-3 (ranges); positions below 0 count from the end of sequences of one length. Several
    --do are one change, stacked in their order; several --arm are separate changes, each with its own controls;
    --do all tries each intervention by itself. `sinkscope list interventions` shows their names and parameters."""

    panel: ClassVar = "Intervening"

    writes: ClassVar = "runs/MODEL-DO"
    repeatable: ClassVar = True
    in_memory: ClassVar = True
    defaults: ClassVar = {"observables": ALWAYS}
    shown: ClassVar = {"observables": "attention, massive and mean-maps, which are always measured"}
    hidden: ClassVar = ("arms",)  # for Python and recipes

    do: Annotated[tuple[str, ...], text_as_tuple] = option(
        (),
        "An intervention, or all; several are stacked in their order.",
        metavar="NAME[:K=V,…]",
        names="sinkscope.interventions:INTERVENTIONS",
    )
    arm: Annotated[tuple[str, ...], text_as_tuple] = option(
        (),
        "An arm of its own: an intervention, or a stack NAME+NAME; several are measured one by one in the same run.",
        metavar="NAME[:K=V,…]",
        names="sinkscope.interventions:INTERVENTIONS",
    )
    arms: dict[str, Annotated[tuple[str, ...], text_as_tuple]] = option(
        {}, "Label → the stack of interventions of that arm."
    )

    @field_validator("observables")
    @classmethod
    def _always(cls, names: tuple[str, ...] | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*ALWAYS, *(names or ()))))

    @model_validator(mode="after")
    def _check_arms(self) -> "InterveneOptions":
        if not (self.do or self.arm or self.arms):
            raise ValueError("name what to do: --do NAME[:key=value,…]; `sinkscope list interventions` shows the names")
        if bool(self.do) + bool(self.arm) + bool(self.arms) > 1:
            raise ValueError(
                "--do is one stack of interventions, and --arm a stack of its own each: use one of the two"
            )
        if "all" in self.do and len(self.do) > 1:
            raise ValueError("--do all tries every intervention by itself, so no other can be given")
        return self

    @property
    def stacks(self) -> "dict[str, tuple[str, ...]] | Literal['all']":
        """The interventions of each arm by label; or "all", if each intervention is an arm."""
        if self.do == ("all",):
            return "all"
        if self.arm:  # a + in front of a letter joins interventions, one in front of a number joins numbers
            return {stack.strip(): tuple(re.split(r"\+(?=\s*[a-z])", stack)) for stack in self.arm}
        return self.arms or {"+".join(part.partition(":")[0] for part in self.do): self.do}

    def folder(self) -> Path:
        arms = "all" if self.stacks == "all" else "-and-".join(self.stacks)
        if len(arms) > LONGEST:  # a file system takes 255 bytes
            arms = f"{len(self.stacks)}-arms-{sha256(arms.encode()).hexdigest()[:6]}"
        return Path("runs", as_folder_name(self.folder_name, arms))
