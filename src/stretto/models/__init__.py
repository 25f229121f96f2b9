"""Models: Stretto's own, and the building of any model from settings."""
