"""`doctor`: the facts, checks and notes of its report."""

import pytest
from support.every_model import tiny_of
from tiny import tiny_model

from sinkscope.attention import seam
from sinkscope.commands.doctor import doctor
from sinkscope.interventions import INTERVENTIONS
from sinkscope.measuring.observables import OBSERVABLES


def test_the_doctor_lists_what_applies_and_notes_only_what_is_expected() -> None:
    report = doctor(tiny_model("llama"))
    unexpected = [name for kinds in (OBSERVABLES, INTERVENTIONS) for name, kind in kinds.items() if not kind.expected]
    assert "gate" in unexpected
    assert not [note for note in report.notes if note.split(" does not apply")[0] in unexpected]
    assert "query-bias does not apply: its queries have no bias" in report.notes
    observables, interventions = (report.facts[kind].split(", ") for kind in ("observables", "interventions"))
    assert ("attention" in observables, "gate" in observables) == (True, False)
    assert ("mask-sink" in interventions, "nullify-query-bias" in interventions) == (True, False)


@pytest.mark.parametrize("model_type", ["gpt_oss", "granite_swa"])
def test_a_learned_sink_is_compared_by_what_reaches_the_values(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """granite_swa's eager attention returns its weights before it multiplies the output by 1 − the sink's share."""
    assert doctor(tiny_of(model_type)).ok
    own = seam.attend
    monkeypatch.setattr(seam, "attend", lambda *args, s_aux=None, **kwargs: own(*args, **kwargs))
    wrong = [what for what, passed, _ in doctor(tiny_of(model_type)).checks if not passed]
    assert "attention to position 0 equals transformers' eager attention" in wrong
