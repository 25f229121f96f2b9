"""Planning: variants of a job's step, lowered, proved and predicted; the fastest becomes the plan."""
