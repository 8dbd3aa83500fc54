"""A chat as text: the tokenizer's template, filled with the messages of a request."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from weightwire.errors import first_line
from weightwire.server.refusal import bad_request

__all__ = ["render_chat"]


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], *, reply: bool
) -> str:
    """The text of a chat. Raises a Refusal if the template does not accept it.

    - `variables`: of the template, such as `enable_thinking`.
    - `reply`: whether the text ends where the answer begins.
    """
    if not tokenizer.chat_template:
        raise bad_request("the served model has no chat template: use /v1/completions")
    for name in variables.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys():
        raise bad_request(f"chat_template_kwargs must not contain {name!r}: pass variables of the template only")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=reply, **dict(variables)
        )
    except Exception as problem:  # a template can raise anything
        raise bad_request(f"the chat template does not accept the messages: {first_line(problem)}") from problem
    return str(text)
