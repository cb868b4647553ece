"""Measurements as charts: lines, the roofline, counts with their χ² test."""

from minillm.viz.charts.line_chart import LineChart, Series
from minillm.viz.draw.plot import Axis

__all__ = ["Axis", "LineChart", "Series"]
