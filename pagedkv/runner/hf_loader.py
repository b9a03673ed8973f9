"""Reading a model out of a Hugging Face folder: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import safetensors
from torch import Tensor

from pagedkv.checks import show
from pagedkv.errors import UsageError
from pagedkv.runner.hf_config import read_hf_config
from pagedkv.runner.tokenizer import Tokenizer, read_json_object
from pagedkv.runner.weights import is_norm

_CONFIG, _GENERATION, _WEIGHTS, _INDEX = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
_OTHER_SENSES = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
)  # fmt: skip


class HFSource:
    """One opened folder: its configuration at once, its tokenizer and tensors on demand.

    Raises
    ------
    UsageError
        The folder has no config.json or no safetensors, or holds a model of another architecture.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        if not (folder / _CONFIG).is_file():
            raise UsageError(f"model: expected a {_CONFIG}, got a folder without one, in {folder}")
        values = read_json_object(folder / _CONFIG)
        values.setdefault("_name_or_path", folder.name)
        generation = folder / _GENERATION
        if generation.is_file():  # chat models list their end-of-turn tokens only here
            eos = read_json_object(generation).get("eos_token_id")
            values["eos_token_id"] = values.get("eos_token_id") if eos is None else eos
        architecture, self.config = read_hf_config(values, where=str(folder / _CONFIG))
        self._is_gemma = architecture.startswith("gemma")
        self._files = self._weight_files()

    def tokenizer(self) -> Tokenizer | None:
        """Build the tokenizer; None when the folder has no tokenizer.json."""
        return Tokenizer.from_folder(self._folder)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), one at a time."""
        for file in self._files:
            try:
                with safetensors.safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (a safe_open handle can't be iterated)
                        if not name.startswith(_OTHER_SENSES):
                            yield self._translate(name, opened.get_tensor(name))
            except (safetensors.SafetensorError, OSError) as error:
                raise UsageError(
                    f"model: expected a whole safetensors file, got {error}, in {file}"
                ) from error

    def _translate(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        if self._is_gemma:
            # Where a text model is a part of a larger one; new releases have the first order, old the second.
            name = name.replace("model.language_model.", "model.").removeprefix("language_model.")
            if is_norm(name):  # Gemma's checkpoints hold what is added to 1
                tensor = tensor.float() + 1
        return name, tensor

    def _weight_files(self) -> list[Path]:
        """Return one file, or all that the index of a sharded model names."""
        index = self._folder / _INDEX
        if index.is_file():
            weight_map = read_json_object(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
                raise UsageError(f"weight_map: expected names and files, got {show(weight_map)}, in {index}")
            files = [self._folder / name for name in sorted(set(weight_map.values()))]
        else:
            files = [self._folder / _WEIGHTS]
        for file in files:
            if not file.is_file():
                raise UsageError(f"model: expected {file.name}, got no such file, in {self._folder}")
        return files
