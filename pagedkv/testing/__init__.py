"""Parts for testing what is built on pagedkv, shipped with it.

``pagedkv.testing.model``
    The meaning of the pool in plain Python: an oracle to run side by side with `BlockPool`. Needs no torch.
"""
