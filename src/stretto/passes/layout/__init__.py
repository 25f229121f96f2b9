"""Layouts: passes that make one rank's step of a step at global shapes (`stretto.passes.layout.shard`)."""
