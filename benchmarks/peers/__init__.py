"""Other engines, driven by harnesses of our own, each in an environment of its own."""
