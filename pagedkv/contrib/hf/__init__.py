"""Paged K and V with prefix reuse for models of transformers.

::

    from pagedkv.contrib.hf import PagedCache

    cache = PagedCache.for_model(model, memory="2GiB")
    model.generate(ids, past_key_values=cache.session(ids))

Importing this registers ``attn_implementation="pagedkv"``.
"""

from pagedkv.contrib.hf.versions import check_transformers

check_transformers()

from pagedkv.contrib.hf.cache import PagedCache  # noqa: E402
from pagedkv.contrib.hf.many import Generated, Report, generate_many  # noqa: E402
from pagedkv.contrib.hf.registering import register_attention  # noqa: E402
from pagedkv.contrib.hf.session import PagedSession  # noqa: E402

register_attention()

__all__ = ["Generated", "PagedCache", "PagedSession", "Report", "generate_many"]
