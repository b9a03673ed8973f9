"""What this library is timed at."""
