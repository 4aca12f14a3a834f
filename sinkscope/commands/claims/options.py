"""The options of `claims`."""

from pathlib import Path
from typing import ClassVar

from pydantic import field_validator

from sinkscope.options.files import UserPath
from sinkscope.options.given import Given
from sinkscope.options.measuring import ControlOptions, ObservableOptions, RunConfig
from sinkscope.options.option import as_folder_name, option


class ClaimsOptions(ControlOptions, RunConfig):
    """Test the claims of papers on a model: a scorecard with intervals.

    Measures what the claims need (natural, random and repeated tokens, gradients, random weights of the same
    architecture, interventions), and judges each by its 95 % interval. After an interruption, the same command resumes.

    --from alone judges existing runs, of one model or several, and loads none. With a MODEL (the demo by its name), it
    judges those runs and measures what they lack."""

    panel: ClassVar = "Measuring"
    writes: ClassVar = "runs/MODEL-claims"
    in_memory: ClassVar = True
    resumable: ClassVar = True
    # arms take half of the time; on the models of reports/claims five controls give the same outcomes
    defaults: ClassVar = {"draws": 3}
    refused: ClassVar = {"observables": "each claim names what it needs"}
    hidden: ClassVar = tuple(ObservableOptions.model_fields)

    nulls: int = option(
        5, "Draws of random weights: a claim is specific to the model if none of them passes it.", metavar="N", ge=1
    )
    from_: tuple[UserPath, ...] = option(
        (),
        "A run to judge, or a folder of `retrofit`, `train`, `claims`, `analyze` over steps, or of cells; repeatable.",
        panel="Input",
        metavar="RUN",
    )

    @field_validator("input")
    @classmethod
    def _a_text(cls, source: str | Given) -> str | Given:
        if source in ("random", "repeated"):
            raise ValueError("claims measures random and repeated tokens besides a text: name a text")
        return source

    @property
    def only_judges(self) -> bool:
        """Whether only given runs are judged, without loading a model."""
        return bool(self.from_) and self.model is None and self.gguf_file is None

    def folder(self) -> Path | None:
        return None if self.only_judges else Path("runs", as_folder_name(self.folder_name, "claims"))
