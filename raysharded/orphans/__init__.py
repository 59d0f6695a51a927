"""Workers that outlive their driver: under a lease, and with one orphan checkpoint. No Ray here."""
