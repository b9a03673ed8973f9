"""Chat templates: the Jinja text by which a model's makers lay out a conversation."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedkv.checks import show
from pagedkv.errors import UsageError

# What a template's own expressions may raise, by a mistake of theirs or by messages that they don't expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class ChatTemplate:
    """One template, compiled when it is first rendered: plain prompts work with a broken one.

    It comes with the model file, so it runs in Jinja's sandbox and sees nothing but its arguments.

    Parameters
    ----------
    source : str
        The Jinja text.
    bos_token, eos_token : str
        Texts of the special tokens, which templates refer to by these names.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self._source = source
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda pattern: datetime.datetime.now().strftime(pattern),
            bos_token=bos_token,
            eos_token=eos_token,
        )

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
            `messages` is empty or malformed, the template itself refuses them, or it isn't valid Jinja.
        """
        have_roles = [isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages]
        if not have_roles or not all(have_roles):
            raise UsageError(f"messages: expected mappings with a role, got {show(messages)}")
        template = self._template
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except _TEMPLATE_ERRORS as error:
            raise UsageError(f"messages: expected what the chat template accepts, got {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return self._environment.from_string(self._source)
        except _TEMPLATE_ERRORS as error:
            raise UsageError(f"chat template: expected valid Jinja, got {error}") from error


class _Generation(Extension):
    """Hugging Face's ``{% generation %}``: marks what the assistant wrote, and adds nothing to the text."""

    tags = {"generation"}  # noqa: RUF012 (declared by Jinja)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """Read to ``{% endgeneration %}``; what is set inside stays inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not; and templates pass these, in this order.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
