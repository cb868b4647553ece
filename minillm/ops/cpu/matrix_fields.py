"""The description of a packed matrix: a row of integers with these fields."""

from __future__ import annotations

PANEL, COLUMNS, OUTPUTS, SCALES, CODE_SUMS, BIAS, GROUP, INPUTS = range(8)
"""PANEL: index of its first panel in the weights. COLUMNS, OUTPUTS: its columns and rows (rows padded to a multiple of
sixteen). SCALES, CODE_SUMS, BIAS: indices of its scales, sums of codes and bias in `step.Weights.vectors`. For nibbles
also GROUP: columns that share a scale, and INPUTS: index of its input scales in `vectors`."""
MATRIX_FIELDS = 8
NONE = -1
"""The value of a field that the matrix does not have."""
