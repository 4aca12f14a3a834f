"""The options of `doctor`."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from sinkscope.options.files import UserPath
from sinkscope.options.measuring import ObservableOptions, RunConfig
from sinkscope.options.option import option


class DoctorOptions(RunConfig):
    """Check a model before a long run: family, sites, kernels, parity with eager on 64 tokens,
    and the observables that apply.

    With --dtype also whether it overflows in that dtype: predicted from a text, then checked by running it, with what
    a clip and a rescaling cost. With --compare, whether a server or an exported model computes the same logits.

    Exit status 1 if a check fails."""

    panel: ClassVar = "Checking"

    writes: ClassVar = "nothing"
    defaults: ClassVar = {"num_seqs": 8}
    refused: ClassVar = {
        "attn": "`doctor` tries all kernels",
        "batch_size": "`doctor` reads one sequence at a time",
        "skip_parity": "parity is what `doctor` checks",
        **dict.fromkeys(ObservableOptions.model_fields, "`doctor` measures no observables"),
    }

    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"] | None = option(  # type: ignore[assignment]
        None,
        "Whether the model overflows in float16 or bfloat16, or what float8_e4m3 or float8_e5m2 costs, scaled as "
        "served: 0.1 nats per token fail. With --compare, the dtype that the logits were computed in.",
        metavar="D",
        shown="not checked",
    )
    images: UserPath | None = option(
        None,
        "Pictures, on which --dtype also examines linear layers and norms of the vision tower and the projector.",
        metavar="DIR",
        shown="none",
    )
    compare: UserPath | None = option(
        None,
        "Logits (sequences, tokens, vocabulary) of a server or an exported model, .npz or .npy, for the token ids of "
        "--input IDS.npy.",
        metavar="FILE",
    )

    @model_validator(mode="after")
    def _ids_to_compare(self) -> Self:
        if self.compare is not None and (
            not str(self.input).endswith(".npy") or self.dataset or self.prompt is not None
        ):
            raise ValueError("--compare needs the token ids that the logits are for: --input IDS.npy")
        return self
