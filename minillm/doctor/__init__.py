"""What this machine can run, and how fast it is: `minillm doctor`, and the first line of a lesson."""

LOW_MEMORY_BYTES = 10**9
"""With less memory free, a lesson may fail; the lessons are built to need no more."""
