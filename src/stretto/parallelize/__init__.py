"""Parallelize: what turns a model for one device into the part of one rank, before it is captured."""
