"""Plans of reads and writes over ranks, each byte once. Pure."""
