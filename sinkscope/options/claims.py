"""The options of `claims`."""

from pathlib import Path
from typing import ClassVar

from pydantic import field_validator

from sinkscope.options.files import UserPath
from sinkscope.options.measuring import ControlOptions, ObservableOptions, RunConfig
from sinkscope.options.option import as_folder_name, option


class ClaimsOptions(ControlOptions, RunConfig):
    about: ClassVar[str] = """Test on a model what five papers say happens: a scorecard with intervals.

    Measures what the claims need (natural, random and repeated tokens, gradients, random weights of the same
    architecture, interventions), and judges each by its 95 % interval. Interrupted, the same command goes on.

    --from alone judges runs that are there, of one model or several, and loads none. With a MODEL besides (the demo by
    its name), those runs are judged and what they lack is measured."""
    writes: ClassVar = "runs/MODEL-claims"
    in_memory: ClassVar = True
    resumable: ClassVar = True
    # arms are half of the time; on the models of reports/claims no outcome differs from that of five controls
    defaults: ClassVar = {"draws": 3}
    refused: ClassVar = {"observables": "each claim names what it needs"}
    hidden: ClassVar = tuple(ObservableOptions.model_fields)

    nulls: int = option(
        5,
        "Measuring",
        "Draws of random weights: a claim tells the model from these if none of them passes it.",
        metavar="N",
        ge=1,
    )
    from_: tuple[UserPath, ...] = option(
        (),
        "Input",
        "A run to judge, also a folder of `retrofit`, `train`, `sweep`, `claims` or `analyze` over steps; often, too.",
        metavar="RUN",
    )

    @field_validator("input")
    @classmethod
    def _a_text(cls, source: str) -> str:
        if source in ("random", "repeated"):
            raise ValueError("claims measures random and repeated tokens besides a text: name a text")
        return source

    @property
    def only_judges(self) -> bool:
        """Whether runs are judged and no model is loaded."""
        return bool(self.from_) and self.model is None and self.gguf_file is None

    def folder(self) -> Path | None:
        return None if self.only_judges else Path("runs", as_folder_name(self.folder_name, "claims"))
