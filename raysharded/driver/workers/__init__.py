"""Workers that join, fail and leave."""
