"""What a step knows of a matrix: a row of numbers, one for each of these."""

from __future__ import annotations

PANEL, COLUMNS, OUTPUTS, SCALES, SUMS, BIAS, GROUP, INPUTS = range(8)
"""Where its panels begin among all weights, its columns, its rows (a multiple of sixteen), where its scales, its sums
of codes and its bias begin among the vectors; and for nibbles, how many columns share a scale, and where what its
inputs are multiplied by begins among the vectors."""
MATRIX_FIELDS = 8
NONE = -1
"""In the place of an offset: there is none."""
