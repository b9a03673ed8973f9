"""PagedCache: the pages of one transformers model, and what is cached in them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv import ops
from pagedkv.checks import check_int, show
from pagedkv.config import Backend
from pagedkv.contrib.hf.dense import DenseView
from pagedkv.contrib.hf.hooks import after_forward, before_forward
from pagedkv.contrib.hf.layer import LayerKV
from pagedkv.contrib.hf.probing import hands_on_keys, probe_layers, takes_cache
from pagedkv.contrib.hf.registering import NAME as IN_PLACE
from pagedkv.contrib.hf.releases import ASKS_FOR_MASKS
from pagedkv.contrib.hf.rows import Rows
from pagedkv.contrib.hf.session import PagedSession
from pagedkv.contrib.hf.store import PageStore, specs_of
from pagedkv.contrib.hf.watching import unwatch_prompts, watch_prompts
from pagedkv.contrib.hf.windows import narrowest_window
from pagedkv.errors import StateError, UsageError
from pagedkv.extras import AnyExtra
from pagedkv.pool import BlockPool
from pagedkv.spec import parse_bytes
from pagedkv.stats import CacheStats

CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose K depends on the length of the whole text, once it is longer than in training."""


class PagedCache:
    """K and V of everything a model has read, found again by later calls of `generate`.

    ::

        cache = PagedCache.for_model(model, memory="2GiB")
        model.generate(ids, past_key_values=cache.session(ids))

    Made by :meth:`for_model`. A context manager that closes.

    Attributes
    ----------
    pool : BlockPool
        Also for `match`, `explain`, `retain`, `evict`, `take_events` and so on.
    num_blocks, block_size : int
    modules : tuple of Module
        Those of the model that a session may be given to.
    layers : list of LayerKV
        What each layer of the model keeps.
    windows : list of int or None
        Sliding windows of the layers, as far as the release of transformers tells a cache of them.
    narrowest_window : int or None
    hook_key : object
        By which the hooks on the model know the cache, without keeping it in memory.
    is_closed : bool
    token_s : float
        Seconds for a token, in the fastest first pass of all sessions so far; infinite before.
    """

    def __init__(
        self, model: Any, num_layers: int, store: PageStore, pool: BlockPool, layers: list[LayerKV]
    ) -> None:
        self.model = model
        self.store = store
        self.pool = pool
        self.layers = layers
        self.num_blocks, self.block_size = pool.num_blocks, pool.block_size
        kept = {kv.layer: kv for kv in layers}
        self.windows = [kept[i].window if i in kept else None for i in range(num_layers)]
        self.narrowest_window = narrowest_window(model.config.get_text_config(decoder=True), self.windows)
        self.position_limit = position_limit(model.config.get_text_config(decoder=True))
        self.token_s = inf
        self._hands_on_keys: bool | None = None
        self._spare: deque[tuple[object, npt.NDArray[np.uint32], DenseView]] = deque(maxlen=1)
        self.reads_in_place()  # so that a model which can't is refused here
        # Some releases run chunks of a prompt past the hooks of the outer one.
        inner = [child for child in model.children() if takes_cache(child)]
        self.modules = tuple(dict.fromkeys([model, getattr(model, "base_model", model), *inner]))
        self.hook_key = object()
        self.is_closed = False
        self._hooks = []
        for module in self.modules:
            self._hooks += [
                module.register_forward_pre_hook(partial(before_forward, self.hook_key), with_kwargs=True),
                module.register_forward_hook(after_forward, with_kwargs=True, always_call=True),
            ]
        watch_prompts(model)

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        num_blocks: int | None = None,
        memory: int | str | None = None,
        block_size: int = 16,
        namespace: bytes | None = None,
        prefix_caching: bool = True,
        events: bool = False,
        backend: Backend | None = None,
    ) -> PagedCache:
        """Make the pages for a model; runs one token through it to learn what its layers keep.

        Adds hooks to the model, which `close` removes; calls without a session are as before.

        Parameters
        ----------
        model : PreTrainedModel
            A decoder of attention layers. One of PEFT is taken with the adapter that is active.
        num_blocks : int, optional
            Pages of `block_size` tokens. Give this or `memory`.
        memory : int or str, optional
            Bytes for all pages, or text such as "2GiB".
        block_size : int
            Tokens in a block.
        namespace : bytes, optional
            Of the pool; by default the model's name and dtype.
        prefix_caching, events
            As for :class:`BlockPool`.
        backend : str, optional
            Of the operations on pages.

        Raises
        ------
        UsageError
            For a model with an encoder or recurrent layers, and for a size that is none.
        CapacityError
            When a device has no memory for so many pages.
        """
        if hasattr(model, "get_base_model"):  # of PEFT, whose generate calls the model inside
            model = model.get_base_model()
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "get_input_embeddings"):
            raise UsageError(f"model: expected a PreTrainedModel, got {show(model)}")
        if (num_blocks is None) == (memory is None):
            raise UsageError(
                f"for_model: expected num_blocks or memory, got {'neither' if memory is None else 'both'}"
            )
        num_layers, layers = probe_layers(model)
        if num_blocks is None:
            bytes_per_block = sum(spec.bytes_per_block for spec, _ in specs_of(layers, block_size))
            num_blocks = parse_bytes(memory if memory is not None else 0) // bytes_per_block
            if num_blocks < 1:
                need = f"at least the {bytes_per_block} bytes of one block"
                raise UsageError(f"memory: expected {need}, got {show(memory)}")
        num_blocks = check_int("num_blocks", num_blocks, 1, 2**31 - 1)
        store = PageStore(layers, num_blocks, block_size, backend=backend)
        for kv in layers:
            ops.resolve_backend(backend, kv.device)
        if namespace is None:
            name = getattr(model.config, "_name_or_path", "") or type(model).__name__
            namespace = f"{name} {str(layers[0].dtype).removeprefix('torch.')}".encode()
        pool = BlockPool(
            num_blocks,
            block_size=block_size,
            namespace=namespace,
            prefix_caching=prefix_caching,
            events=events,
        )
        return cls(model, num_layers, store, pool, layers)

    def session(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        salt: str | bytes | Iterable[str | bytes | None] | None = None,
        extras: Iterable[AnyExtra] = (),
    ) -> PagedSession:
        """Begin a call of `generate`, or a conversation: find what is cached of each row of the prompt.

        Parameters
        ----------
        input_ids : Tensor [num_tokens] or [batch, num_tokens], lists, or what a tokenizer returned
            The prompt that `generate` is going to be given. Its mask comes along with a tokenizer's result.
        attention_mask : Tensor [batch, num_tokens], optional
            0 for padding, on the left or on the right. By default what `generate` takes: no padding, unless
            the model's padding token, which then has to differ from the one that ends a text, is in the ids.
        salt : str or bytes, or one for each row, optional
            What is cached under another salt, or under none, is not found.
        extras : iterable of Adapter, Media, Extra
            What else all rows' K and V depend on.

        Returns
        -------
        PagedSession

        Raises
        ------
        UsageError
        StateError
            When the cache was closed.
        """
        if self.is_closed:
            raise StateError("session: expected an open cache, got one that was closed")
        if hasattr(input_ids, "keys"):
            attention_mask = input_ids.get("attention_mask") if attention_mask is None else attention_mask
            input_ids = input_ids["input_ids"]
        ids = _as_rows("input_ids", input_ids, "iub", "integers").astype(np.int64)
        if attention_mask is None:
            is_token = self._infer_mask(ids)
        else:
            mask = _as_rows("attention_mask", attention_mask, "iubf", "zeros and ones")
            is_token = mask != 0
            if mask.dtype.kind == "f" and (mask[is_token] != 1).any():  # one that is added, say
                got = show(float(mask[is_token][mask[is_token] != 1][0]))
                raise UsageError(f"attention_mask: expected zeros and ones, got {got} among them")
        if is_token.shape != ids.shape:
            raise UsageError(f"attention_mask: expected {list(ids.shape)}, got {list(is_token.shape)}")
        if not is_token.any(1).all():
            raise UsageError(
                f"attention_mask: expected a token in every row, got none in row {is_token.any(1).argmin()}"
            )
        salts = [salt] * len(ids) if salt is None or isinstance(salt, str | bytes) else list(salt)
        if len(salts) != len(ids):
            raise UsageError(f"salt: expected one for each of {len(ids)} rows, got {len(salts)}")
        extras = tuple(extras)
        reuse = not self._asks_padding(is_token)
        rows = []
        for own, is_own, own_salt in zip(ids, is_token, salts, strict=True):
            tokens = own[is_own]
            if self.position_limit is not None and len(tokens) > self.position_limit:
                # Its K would differ from what shorter texts left, and theirs from its.
                seq = self.pool.open(tokens, cache_salt=os.urandom(16), extras=extras)
                seq.no_cache(0)
            else:
                seq = self.pool.open(tokens, cache_salt=own_salt, extras=extras, reuse=reuse)
            rows.append(seq)
        batch = Rows(self.pool, rows, is_token, self.position_limit)
        return PagedSession(self, batch, bool(extras), (salts[0], extras))

    def reads_in_place(self) -> bool:
        """Whether the model's attention reads pages: ``attn_implementation="pagedkv"``."""
        config = self.model.config.get_text_config(decoder=True)
        if config._attn_implementation != IN_PLACE:
            return False
        if self._hands_on_keys is None:
            usual = all(kv.kind != "other" for kv in self.layers)
            self._hands_on_keys = hands_on_keys(self.model) and usual
        return self._hands_on_keys

    def take_view(self, identity: object, tokens: npt.NDArray[np.uint32]) -> DenseView:
        """Return what the last closed session has gathered, as far as it began with these tokens.

        So that one prompt after the other with the same beginning gathers it once.
        """
        try:
            of, known, view = self._spare.pop()  # by one thread only
        except IndexError:
            return DenseView(self.store)
        if of != identity:
            return DenseView(self.store)
        length = min(len(known), len(tokens))
        differ = np.flatnonzero(known[:length] != tokens[:length])
        view.forget(int(differ[0]) if len(differ) else length)
        return view

    def keep_view(self, identity: object, tokens: npt.NDArray[np.uint32], view: DenseView) -> None:
        """Keep what a session of one row has gathered, for the next one."""
        self._spare.append((identity, tokens, view))

    def stats(self) -> CacheStats:
        """Return a snapshot of the pool's counters."""
        return self.pool.stats()

    def reset(self) -> bool:
        """Forget everything cached, as after the weights have changed; see :meth:`BlockPool.reset`."""
        self._spare.clear()
        return self.pool.reset()

    def close(self) -> None:
        """Remove the hooks from the model. Sessions can't be used afterwards."""
        self.is_closed = True
        self._spare.clear()
        for hook in self._hooks:
            hook.remove()
        unwatch_prompts(self.model)

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PagedCache of {type(self.model).__name__}: {self.pool!r}>"

    def _asks_padding(self, is_token: npt.NDArray[np.bool_]) -> bool:
        """Whether some row's next token is asked of padding that sees padding alone, and so what it holds.

        Nothing is to be reused then, and all the padding computed, as without us.
        """
        window = self.narrowest_window
        if window is None or not takes_means(self.model.config.get_text_config(decoder=True)):
            return False
        return bool(is_token[:, ::-1].argmax(1).max() >= window)

    def _infer_mask(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Say which columns hold tokens, as generate does when it is given no mask."""
        config = getattr(self.model, "generation_config", None) or self.model.config
        pad, eos = config.pad_token_id, config.eos_token_id
        ends = eos if isinstance(eos, list) else [eos]
        if pad is None or pad in ends:
            return np.ones(ids.shape, dtype=bool)
        is_token: npt.NDArray[np.bool_] = ids != pad
        return is_token


def position_limit(config: Any) -> int | None:
    """Return how many tokens a text may have whose K depends on tokens and positions alone; None: any."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(own for own in rope.values() if isinstance(own, dict))]
    limits = [
        own.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for own in kinds
        if (own.get("rope_type") or own.get("type")) in CHANGING_ROPE
    ]
    return min(limits, default=None)


def takes_means(config: Any) -> bool:
    """Whether attention takes the mean of all there is where a query sees nothing; else it gives zeros."""
    attention = config._attn_implementation
    has_soft_cap = bool(getattr(config, "attn_logit_softcapping", None))
    return attention == "eager" or not ASKS_FOR_MASKS or (attention == IN_PLACE and has_soft_cap)


def _as_rows(name: str, values: Any, kinds: str, expected: str) -> npt.NDArray[Any]:
    """Return an array [batch, num_tokens] of one of these kinds of numbers, as numpy calls them."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in kinds:
        raise UsageError(
            f"{name}: expected {expected} [batch, num_tokens], rows of one length, got {show(values)}"
        )
    return array
