"""Claims on fine-tuning: a plain arm and VGA beside the model that both began from (VGA table 3, WSE figure 30)."""

from sinkscope.paper_claims.claim import Claim, Part, above, below
from sinkscope.paper_claims.over_seeds import difference, metric, ratio
from sinkscope.paper_claims.trainings import PLAIN
from sinkscope.results.papers import published
from sinkscope.training.tables import UNTOUCHED

GATE = "vga"
TUNED = f"retrofit:{PLAIN},{UNTOUCHED}"
GATED = f"retrofit:{PLAIN},{GATE},{UNTOUCHED}"
NORM, KURTOSIS = metric("max_inf_norm"), metric("kurtosis")

CLAIMS = (
    Claim("V-20", "table 3", "A plain fine-tune worsens the norm.",
        (Part("max infinity norm behind ÷ in front", ratio(TUNED, NORM, PLAIN, UNTOUCHED), above(1.0)),), (TUNED,),
        published=published("VGA table 3", {"GPT-2": 1.55}, "fine-tuned"), is_ours=False),
    Claim("V-21", "table 3", "The retrofit cures.",
        (Part("max infinity norm, VGA ÷ in front", ratio(GATED, NORM, GATE, UNTOUCHED), below(0.2)),
         Part("kurtosis, VGA ÷ in front", ratio(GATED, KURTOSIS, GATE, UNTOUCHED), below(0.05))), (GATED,),
        published=published("VGA table 3", {"GPT-2": 0.094}, "fine-tuned")),
    Claim("V-22", "table 3", "And has the best perplexity.",
        (Part("perplexity, VGA − plain fine-tune", difference(GATED, metric("perplexity"), GATE), below(0.0)),),
        (GATED,), published=published("VGA table 3", {"GPT-2": -0.07}, "fine-tuned"), is_ours=False),
    Claim("W-60", "fig. 30", "Fine-tuning stays stable.",
        (Part("held-out loss behind − in front", difference(TUNED, metric("loss"), PLAIN, UNTOUCHED), below(0.0)),),
        (TUNED,), published=published("WSE fig. 30", {"about": 1.8 - 2.6}, "1 B, loss in training")),
)  # fmt: skip
