"""What the doctor says of a model, and what it leaves unsaid."""

from tiny import tiny_model

from sinkscope.commands.doctor import doctor
from sinkscope.interventions import INTERVENTIONS
from sinkscope.measuring.observables import OBSERVABLES


def test_the_doctor_notes_nothing_that_nobody_expected() -> None:
    notes = doctor(tiny_model("llama")).notes
    unexpected = [name for kinds in (OBSERVABLES, INTERVENTIONS) for name, kind in kinds.items() if not kind.expected]
    assert "gate" in unexpected
    assert not [note for note in notes if note.split(" does not apply")[0] in unexpected]
    assert "query-bias does not apply: its queries have no bias" in notes


def test_the_doctor_lists_what_applies() -> None:
    facts = doctor(tiny_model("llama")).facts
    assert "attention" in facts["observables"]
    assert "gate" not in facts["observables"].split(", ")
    assert "mask-sink" in facts["interventions"]
    assert "nullify-query-bias" not in facts["interventions"]
