"""Orders of actions: the families, their text form, their timing and their drawings.

This room knows `stretto.ir` and nothing above it. A family knows stages and microbatches, never ops.
"""
