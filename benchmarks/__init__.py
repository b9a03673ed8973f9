"""What times the library; see docs/design/benchmarks.md."""
