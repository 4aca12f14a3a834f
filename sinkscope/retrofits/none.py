"""No change: the plain fine-tune that every retrofit is compared with (VGA table 3, "fine-tuning w/o VGA")."""

from typing import ClassVar

from transformers import PreTrainedModel

from sinkscope.models.family import Family
from sinkscope.retrofits.retrofit import Retrofit


class Plain(Retrofit):
    name: ClassVar[str] = "none"
    about: ClassVar[str] = "nothing: the plain fine-tune that the others are compared with; the model stays what it is"
    paper: ClassVar[str] = "VGA tab. 3"

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        return None

    def install(self, model: PreTrainedModel, family: Family) -> None:
        pass
