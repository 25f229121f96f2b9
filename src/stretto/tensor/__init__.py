"""Global-view tensors on meshes: layouts, reshard, clip."""
