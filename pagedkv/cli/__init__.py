"""The command line. It uses the public interface alone, and needs the extra `cli`."""
