"""Lower bounds of a step: how fast no order of a job's actions and ops on these ranks can be."""
