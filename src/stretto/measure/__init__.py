"""Measuring: op times, links and collectives of this machine, or between running ranks."""
