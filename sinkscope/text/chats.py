"""Renders chats by a tokenizer's chat template, in a separate process.

A chat template is a program that comes with a model. Jinja's sandbox keeps it away from files and code, but lets it
run forever: in nested loops, or in one power of large numbers, which no thread or signal can interrupt. A separate
process can be killed at any time, on every platform; it runs this file as a module.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import Timer
from time import monotonic
from typing import IO, Any

from sinkscope.errors import SinkscopeError, one_line

SECONDS = 10.0  # time limit for rendering one chat; an ordinary template takes milliseconds
LONGEST_CHAT = 1 << 26  # characters of a chat


@contextmanager
def chat_template(tokenizer: Any) -> Iterator[Callable[[Sequence[Mapping[str, str]]], str]]:
    """Yield a function that returns the text of a chat. Its first call starts the process, which the block ends.

    It raises ValueError if the template fails or takes longer than SECONDS.
    """
    with ExitStack() as stack:
        started = cache(lambda: stack.enter_context(_process()))

        def text(messages: Sequence[Mapping[str, str]]) -> str:
            from transformers import PreTrainedTokenizerBase

            if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
                # code of the tokenizer's class renders the chat, as for Mistral
                return str(tokenizer.apply_chat_template(list(messages), tokenize=False))
            chat = [tokenizer.get_chat_template(), tokenizer.special_tokens_map, list(messages)]
            process, questions, answers = started()
            timer, began = Timer(SECONDS, process.kill), monotonic()
            timer.start()
            try:
                print(json.dumps(chat, default=str), file=questions, flush=True)
                line = answers.readline()
            except OSError:  # the process has ended
                line = ""
            finally:
                timer.cancel()
            if not line:
                is_late = monotonic() - began >= SECONDS
                raise ValueError(f"it does not end within {SECONDS:g} seconds" if is_late else "its process ended")
            answer: dict[str, str] = json.loads(line)
            if "error" in answer:
                raise ValueError(answer["error"])
            return answer["text"]

        yield text


@contextmanager
def _process() -> Iterator[tuple[subprocess.Popen[str], IO[str], IO[str]]]:
    """Start the process, with the same search path for packages, and kill it after the block."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "sinkscope.text.chats"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        encoding="utf-8",
    )
    try:
        if process.stdin is None or process.stdout is None or not process.stdout.readline():
            raise SinkscopeError("the process that writes chats did not start: give `text` in place of `messages`")
        yield process, process.stdin, process.stdout
    finally:
        process.kill()
        process.communicate()


def _serve() -> None:
    """Answer each line of standard input (template, special tokens, messages) by a line with the text or the error."""
    from transformers.utils.chat_template_utils import render_jinja_template

    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        template, tokens, messages = json.loads(line)
        try:
            text: str = render_jinja_template([messages], chat_template=template, **tokens)[0][0]
            if len(text) > LONGEST_CHAT:
                raise ValueError(f"it writes more than {LONGEST_CHAT} characters")
            answer = {"text": text}
        except Exception as error:
            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
