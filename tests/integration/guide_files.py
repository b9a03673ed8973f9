"""The files that the commands of the guides read."""

from __future__ import annotations

import json
from pathlib import Path

RULES = " ".join(f"Rule {i}: answer questions about topic {i % 7} from document {i * 3}." for i in range(60))


def write_prompts(folder: Path) -> None:
    """Write prompts.jsonl: requests with the time ahead of their rules, and tools in changing order."""
    lines = []
    for n in range(8):
        tools = [{"name": "search", "text": "find documents"}, {"text": "read one of them", "name": "read"}]
        if n % 2:
            tools = [dict(reversed(tool.items())) for tool in tools]
        lines.append(
            {
                "tools": tools,
                "system": f"It is 2026-11-30 10:{n:02}:17. {RULES}",
                "messages": [{"role": "user", "content": f"What does document {n * 3} say?"}],
            }
        )
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
