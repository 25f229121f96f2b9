"""The words of the house: actions, ops, programs, plans, and their text forms. Imports nothing above it."""
