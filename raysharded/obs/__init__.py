"""What is seen of a run: the live line, the summary of its journal, and tables for people.

`summary` folds journal entries into one value, `tables` shows it, `live` follows a run while it goes on, and
`units` writes numbers as people read them. Nothing here reads or writes storage.
"""
