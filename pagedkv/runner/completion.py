"""One answer of a request: its tokens, its text and how it ended."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Literal

from pagedkv.runner.answer_text import AnswerText
from pagedkv.runner.detokenizer import TextStream
from pagedkv.runner.draw import Draw
from pagedkv.runner.logprobs import TokenLogprobs

if TYPE_CHECKING:
    from pagedkv.runner.request import Request

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


@dataclass(eq=False, kw_only=True)
class Completion:
    """One answer. Made by its request; read it, change nothing.

    Attributes
    ----------
    request : Request
        Whose answer it is.
    index : int
        Which of the request's answers.
    output_ids : list of int
        Tokens so far, with the token that ended the answer.
    top_logits : list of list of (int, float)
        For each of `output_ids` the best tokens with their logits, best first, if the params ask for any.
    logprobs : list of TokenLogprobs
        For each of `output_ids`, if the params ask for them.
    text : str
        Text so far, without end tokens and stop strings.
    finish_reason : {"stop", "length", "abort", "deadline", "error"} or None
        None while it isn't finished.
    stop_reason : int, str or None
        The token or the stop string that ended it; None for another end.
    score : float or None
        Of a beam: its log-probability over its length to the power of the length penalty.
    """

    request: Request = field(repr=False)
    index: int
    stream: InitVar[TextStream | None] = None
    # What may be long is left out of the repr.
    output_ids: list[int] = field(default_factory=list, repr=False)
    top_logits: list[list[tuple[int, float]]] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)
    text: str = field(default="", repr=False)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    def __post_init__(self, stream: TextStream | None) -> None:
        """Set up what carries state from token to token."""
        self._text = AnswerText(stream, self.request.params.stop)

    def accept(self, draw: Draw) -> str:
        """Take the sampled token, set `finish_reason` at the end; return the text that may now be shown."""
        token_id = draw.token_id
        self.output_ids.append(token_id)
        if draw.top_logits:
            self.top_logits.append(draw.top_logits)
        if draw.logprobs is not None:
            self.logprobs.append(draw.logprobs)
        new_text = ""
        if token_id in self.request.end_tokens:
            self.finish_reason, self.stop_reason = "stop", token_id
        else:
            new_text = self._text.put(token_id)
            if self._text.stopped_by is None and len(self.output_ids) == self.request.params.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            new_text += self._text.flush()
        if self._text.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stopped_by
        self.text += new_text
        return new_text
