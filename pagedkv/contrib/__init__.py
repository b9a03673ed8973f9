"""Adapters for engines that have a model, a cache interface or attention kernels of their own.

Each module imports what it adapts to when it is imported; nothing else imports from here.
"""
