"""Races against other systems: the same work, the same processes, in turn. Prints tables, writes JSON."""
