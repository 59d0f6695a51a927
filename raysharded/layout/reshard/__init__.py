"""From the copies of the state that are left to a new layout: the plan of transfers."""
