"""Text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pagedkv.checks import check_bytes
from pagedkv.errors import UsageError
from pagedkv.runner.chat import ChatTemplate
from pagedkv.runner.detokenizer import TextStream


class Tokenizer:
    """A vocabulary, its special tokens and its chat template.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
        Does the splitting and merging.
    bos_token, eos_token : str
        Texts of the special tokens, for the chat template; empty when there are none.
    chat_template : str or None
        The Jinja text; None for a model that wasn't made for conversation.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self.chat_template = (
            None
            if chat_template is None
            else ChatTemplate(chat_template, bos_token=bos_token, eos_token=eos_token)
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Special tokens written out in `text` are recognised. `add_special_tokens` adds those which the model
        wants around every text (a leading BOS, say).

        Raises
        ------
        UsageError
            For what is no text, or none that UTF-8 can express.
        """
        check_bytes("text", text, 0, 2**62, text=True)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self) -> TextStream:
        """Return a decoder that takes tokens one at a time; special tokens show no text."""
        return TextStream(self.decode)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the text that the model expects for a conversation (see `ChatTemplate.render`).

        Raises
        ------
        UsageError
            The model has no chat template, or the template refuses `messages`.
        """
        if self.chat_template is None:
            raise UsageError("chat template: expected one in the model's files, got none; use a plain prompt")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Return the token ids of a conversation that the assistant is to continue."""
        # The template writes the special tokens itself.
        return self.encode(self.apply_chat_template(messages, **variables), add_special_tokens=False)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """Read ``tokenizer.json`` and its companions; None when the folder has no tokenizer."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        text = path.read_text(encoding="utf-8")
        if "model" not in read_json_object(path):
            raise UsageError(f"tokenizer.json: expected a 'model' entry, got none, in {path}")
        settings_path = folder / "tokenizer_config.json"
        settings = read_json_object(settings_path) if settings_path.exists() else {}
        template_path = folder / "chat_template.jinja"
        template: Any = settings.get("chat_template")
        if template_path.exists():
            template = template_path.read_text(encoding="utf-8")
        elif isinstance(template, list):  # several, by name
            template = {each["name"]: each["template"] for each in template}.get("default")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            if type(error) is not Exception:  # which is all that tokenizers raises for a file it can't read
                raise
            raise UsageError(f"tokenizer.json: expected a tokenizer, got {error}, in {path}") from error
        return cls(
            backend,
            bos_token=_token_text(settings.get("bos_token")),
            eos_token=_token_text(settings.get("eos_token")),
            chat_template=template,
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises
    ------
    UsageError
        It can't be read, isn't JSON or isn't an object.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path.name}: expected a JSON file, got {error}, in {path}") from error
    if not isinstance(contents, dict):
        raise UsageError(f"{path.name}: expected a JSON object, got {type(contents).__name__}, in {path}")
    return contents


def _token_text(token: Any) -> str:
    """Return a token's text; settings hold a str, an object with the str in it, or nothing."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token or ""
