"""Parts for testing what is built on pagedkv, shipped with it.

``pagedkv.testing.broken_hashes``
    A context in which all digests are equal: nothing wrong may be served even so.
``pagedkv.testing.model``
    The meaning of the pool in plain Python: an oracle to run side by side with `BlockPool`. Needs no torch.
"""

from pagedkv.testing.hooks import broken_hashes

__all__ = ["broken_hashes"]
