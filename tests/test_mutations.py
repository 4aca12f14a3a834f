"""Every row of `mutations.py` still changes the code that it names. Whether tests notice it, `make mutations` says."""

from collections import Counter
from pathlib import Path

from mutations import MUTATIONS, ROOT, mutated_source, mutations_of_commands
from support.naming import naming


def test_every_mutation_has_a_name_and_its_text_once_in_its_function() -> None:
    every_mutation = [*MUTATIONS, *mutations_of_commands()]
    for mutation in every_mutation:
        path = Path(ROOT, *mutation.module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        with naming(mutation.name):
            assert mutated_source(mutation, path.read_text(encoding="utf-8"))
    assert Counter(mutation.name for mutation in every_mutation).most_common(1)[0][1] == 1
