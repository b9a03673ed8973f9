"""Chat templates: the Jinja text by which a model's makers lay out a conversation."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedkv.checks import show
from pagedkv.errors import UsageError


class ChatTemplate:
    """One compiled template.

    It comes with the model file, so it runs in Jinja's sandbox and sees nothing but its arguments.

    Parameters
    ----------
    source : str
        The Jinja text.
    bos_token, eos_token : str
        Texts of the special tokens, which templates refer to by these names.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda pattern: datetime.datetime.now().strftime(pattern),
            bos_token=bos_token,
            eos_token=eos_token,
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"chat template: expected valid Jinja, got {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Lay out `messages`, each with a ``role`` and a ``content``.

        Parameters
        ----------
        add_generation_prompt : bool
            End with the opening of the assistant's turn, so that the model answers instead of asking on.
        variables
            Anything else that the template knows, such as ``tools``.

        Raises
        ------
        UsageError
            `messages` is empty or malformed, or the template itself refuses them.
        """
        have_roles = [isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages]
        if not have_roles or not all(have_roles):
            raise UsageError(f"messages: expected mappings with a role, got {show(messages)}")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise UsageError(f"messages: expected what the chat template accepts, got {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=False, indent=indent)
