"""Shared by the tests of `retrofit` and `train`: a tokenizer of eight words, small settings, the command line."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from sinkscope.cli.app import app
from sinkscope.options.option import flag

WORDS = ("<pad>", "<s>", "</s>", "<unk>", "the", "of", "and", "drain")

SMALL: dict[str, Any] = {
    "steps": 3, "block_length": 16, "batch_size": 2, "log_every": 1, "observables": "attention,gradient",
}  # fmt: skip


def typed(options: dict[str, Any]) -> tuple[str, ...]:
    """Return options as they are typed on the command line."""
    return tuple(word for name, value in options.items() for word in (flag(name), str(value)))


TYPED = typed(SMALL)


def tokenizer_of(words: Sequence[str], template: str | None, **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words at white space, which puts a template such as "<s> $A </s>" around a text."""
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=special["unk_token"]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        tokens = [(word, words.index(word)) for word in template.split() if word in words]
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def words_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of(WORDS, "<s> $A", unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def command_line(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def succeeded(*args: object) -> Result:
    """Run a command that has to end with status 0."""
    result = command_line(*args)
    assert result.exit_code == 0, result.output
    return result


def refused(status: int, *args: object) -> str:
    """Return the one or two lines of a command that ends with this status and changes no file nearby."""
    before = content_of(Path.cwd().parent)
    result = command_line(*args)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert content_of(Path.cwd().parent) == before
    message = re.sub("^read: .*\n", "", result.stderr).strip()
    assert message.startswith("sinkscope: "), message
    assert message.count("\n") <= 1
    assert "Traceback" not in message
    return message


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Return every path in a folder, including temporary ones, with the content of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
