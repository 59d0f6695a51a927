"""Workers that outlive their driver: under a lease, and with one last checkpoint. No Ray here."""
