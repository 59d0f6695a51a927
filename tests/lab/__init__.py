"""The laboratory: machines in namespaces of this one, Ray on them, and faults of links, machines and the head node."""
