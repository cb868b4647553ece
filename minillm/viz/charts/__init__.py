"""Measurements as charts: lines, bars, the roofline."""

from minillm.viz.charts.line_chart import Axis, LineChart, Series

__all__ = ["Axis", "LineChart", "Series"]
