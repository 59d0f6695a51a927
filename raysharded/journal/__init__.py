"""The run's journal: written, read, and its entries as values and as text."""
