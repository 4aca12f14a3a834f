"""Every row of `mutations.py` still changes the code that it names. Whether tests notice it, `make mutations` says."""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from mutations import MUTATIONS, mutated_source, mutations_of_commands
from support.naming import naming


def test_every_mutation_has_a_name_and_its_text_once_in_its_function() -> None:
    every_mutation = [*MUTATIONS, *mutations_of_commands()]
    for mutation in every_mutation:
        with naming(mutation.name):
            mutated_source(mutation, Path(find_spec(mutation.module).origin).read_text(encoding="utf-8"))
    counts = Counter(mutation.name for mutation in every_mutation)
    assert [name for name, count in counts.items() if count > 1] == []
