"""A model's namespace: equal when KV is equal, and different when anything that KV depends on is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folders import write_tiny_folder
from tiny_models import TINY, random_tensors

from pagedkv.runner.config import ModelConfig
from pagedkv.runner.loader import load_model
from pagedkv.runner.model import Model


def namespace(config: ModelConfig = TINY, **changed: Any) -> bytes:
    return Model(replace(config, **changed), random_tensors(config)).namespace


@pytest.mark.parametrize(
    "changed",
    [{"name": "other"}, {"context_length": 64}, {"bos_token_id": 3}, {"eos_token_ids": frozenset({3})}],
)
def test_what_changes_no_kv_changes_no_namespace(changed: dict[str, Any]) -> None:
    assert namespace(**changed) == namespace()


@pytest.mark.parametrize(
    "changed", [{"rope_theta": 5e5}, {"rms_norm_eps": 1e-6}, {"rope_freq_factors": (1.0, 1.0, 2.0, 4.0)}]
)
def test_way_of_computing_counts(changed: dict[str, Any]) -> None:
    assert namespace(**changed) != namespace()


def test_every_number_of_every_weight_counts() -> None:
    names = {namespace()}
    num_changes = 0
    for name, tensor in random_tensors(TINY).items():
        for index in (0, 1, tensor.numel() // 3, tensor.numel() - 1):
            weights = random_tensors(TINY)
            weights[name].view(-1)[index] += 1e-3
            names.add(Model(TINY, weights).namespace)
            num_changes += 1
    assert len(names) == 1 + num_changes


def test_dtype_of_the_weights_counts() -> None:
    weights = random_tensors(TINY)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    halves = {name: tensor.bfloat16() for name, tensor in zeros.items()}
    assert Model(TINY, zeros).namespace != Model(TINY, halves).namespace


def test_order_and_memory_layout_of_the_weights_do_not_count() -> None:
    turned = {name: t.t().contiguous().t() if t.ndim == 2 else t for name, t in random_tensors(TINY).items()}
    assert Model(TINY, dict(reversed(turned.items()))).namespace == namespace()


def test_folder_s_name_does_not_count(tmp_path: Path) -> None:
    namespaces = []
    for name in ("one", "two"):
        folder = write_tiny_folder(tmp_path / name)
        path = folder / "config.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        del values["_name_or_path"]
        path.write_text(json.dumps(values), encoding="utf-8")
        model = load_model(folder).model
        assert model.config.name == name
        namespaces.append(model.namespace)
    assert namespaces[0] == namespaces[1]
