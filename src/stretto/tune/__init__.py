"""Choosing how a step is laid out on a cluster, by plans of what is most promising (`tune.search`)."""
