"""The operations on pages, one file a backend; :mod:`pagedkv.ops` checks the arguments."""
