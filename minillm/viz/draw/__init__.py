"""Shared drawing tools: SVG elements, colours, glyphs, and the conversion of a picture to a notebook output."""
