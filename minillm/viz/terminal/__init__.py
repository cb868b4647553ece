"""The pictures as coloured text, for a terminal."""
