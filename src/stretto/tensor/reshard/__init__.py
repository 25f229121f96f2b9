"""Resharding: a tensor goes from one layout to another, within a mesh or between meshes. `execute`, `agree`
and `move` need a process group; a plan needs none."""
