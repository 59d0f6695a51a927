"""The plan of transfers from the remaining copies of the state to a new layout."""
