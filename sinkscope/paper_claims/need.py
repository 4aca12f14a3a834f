"""Needs of claims: a run of the model, or a study, which consists of several runs that are read together."""

from dataclasses import dataclass
from typing import Literal, get_args

Analysis = Literal["natural", "null", "with-bos", "without-bos", "length", "domain"]
Controlled = Literal["do", "loss-do", "gradient-do", "repeated-do"]  # interventions with random controls
Alone = Literal["loss-do-alone", "gradient-do-alone"]  # interventions without random controls
Arms = Literal["arms", "retrofit", "train", "backcopy"]  # arms of trainings, over seeds
OtherStudy = Literal["factor", "steps", "course", "sizes", "base", "scores"]
Kind = Analysis | Controlled | Alone | Literal["streaming"] | Arms | OtherStudy

ARMS, STUDIES = get_args(Arms), (*get_args(Arms), *get_args(OtherStudy))
CONTROLLED, ALONE = get_args(Controlled), get_args(Alone)


@dataclass(frozen=True)
class Need:
    kind: Kind  # how it is measured or found (`KINDS` in `evidence.py` and `studies.py`)
    of: str = ""  # the intervention, input, number of tokens, draw, methods or factor; "" for a kind without a choice

    @property
    def name(self) -> str:
        """The name of the role in run.json; in the name of a folder, the colon becomes a hyphen."""
        return f"{self.kind}:{self.of}" if self.of else self.kind

    @property
    def is_study(self) -> bool:
        return self.kind in STUDIES

    @property
    def has_controls(self) -> bool:
        return self.kind in CONTROLLED

    @property
    def is_intervention(self) -> bool:
        return self.kind in (*CONTROLLED, *ALONE)
