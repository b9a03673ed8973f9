"""Prompts in versions that are warm before they are used; and why prompts of a log share too little."""

from pagedkv.prompts.lint import Finding, LintReport, LoggedPrompt, Tokenizer, lint_prompts
from pagedkv.prompts.logs import read_log
from pagedkv.prompts.versions import PromptVersion, PromptVersions

__all__ = [
    "Finding",
    "LintReport",
    "LoggedPrompt",
    "PromptVersion",
    "PromptVersions",
    "Tokenizer",
    "lint_prompts",
    "read_log",
]
