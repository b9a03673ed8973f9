"""What setup.py needs besides setuptools. Not part of the package."""
