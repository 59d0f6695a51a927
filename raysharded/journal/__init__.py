"""The run's journal: writing, reading, and its entries as values and as text."""
