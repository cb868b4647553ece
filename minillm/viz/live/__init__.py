"""Animated pictures: views that follow a running engine, and replays of a recorded trace."""

from minillm.viz.live.live_view import LiveView

__all__ = ["LiveView"]
